# SPDX-License-Identifier: Apache-2.0
"""Programs that tests run and pip does not install: `scripts/find_programs` puts them into .artifacts/debian."""

import os
import shutil
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
DEBIAN = REPO / ".artifacts" / "debian"


def program(name: str) -> str:
    """The path of a program; the test is skipped where there is none."""
    places = (os.environ.get("PATH", ""), "/usr/sbin", str(DEBIAN / "usr/sbin"), str(DEBIAN / "usr/bin"))
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        pytest.skip(f"no {name}: scripts/find_programs")
    return found
