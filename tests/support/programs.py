# SPDX-License-Identifier: Apache-2.0
"""Programs that tests run and pip does not install: `scripts/find_programs` puts them into .artifacts/debian."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
DEBIAN = REPO / ".artifacts" / "debian"


def find(name: str) -> str | None:
    """The path of a program, or None where there is none."""
    places = (os.environ.get("PATH", ""), "/usr/sbin", str(DEBIAN / "usr/sbin"), str(DEBIAN / "usr/bin"))
    return shutil.which(name, path=os.pathsep.join(places))


def program(name: str) -> str:
    """The path of a program. Without it the test is skipped, except where CI=1 says that it must run."""
    found = find(name)
    if found is None:
        why = f"no {name}: scripts/find_programs"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    return found


def cpu_seconds(command: Sequence[str], env: Mapping[str, str]) -> tuple[subprocess.CompletedProcess[str], float]:
    """What a command prints, and the processor time that it took: its own, whatever else this process waits for."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen([*command], stdout=out, stderr=err, env=env)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        said = [(file.seek(0), file.read())[1] for file in (out, err)]
    return subprocess.CompletedProcess([*command], process.returncode, *said), used.ru_utime + used.ru_stime
