# SPDX-License-Identifier: Apache-2.0
"""scripts/make_venv where something is missing: what is seen, and the next command. Its interpreters are stand-ins."""

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

REPO = Path(__file__).parents[2]
OLD = 'case "$1" in -c) exit 1 ;; -V) echo Python 3.10.13 ;; esac\n'
NO_VENV = 'if [ "$1" = -m ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; echo no ensurepip >&2; exit 1; fi\n'
# One whose environments have a pip that says `SAID` and fails.
PIP_FAILS = """case "$2" in
venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
pip) cat SAID; exit 1 ;;
esac
"""
NO_TORCH = """
ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu; platform_machine == "x86_64"
ERROR: No matching distribution found for torch==2.13.0+cpu; platform_machine == "x86_64"
"""


def make_venv(tmp_path: Path, python: str | None, said: str = "") -> "tuple[subprocess.CompletedProcess[str], Path]":
    """Run it with an interpreter that is this shell text, or one that is not there; also the environment's place."""
    program = tmp_path / "python3.99"
    if python is not None:
        (tmp_path / "said").write_text(said)
        program.write_text("#!/bin/sh\n" + python.replace("SAID", f"'{tmp_path}/said'"))
        program.chmod(0o755)
    venv = tmp_path / "venv"
    command = [str(REPO / "scripts" / "make_venv"), str(program), str(venv), "cpu"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False), venv


@pytest.mark.parametrize(
    ("python", "said"),
    [
        (None, "python3.99 is not there: install Python 3.11 or newer, or name one with 'make PYTHON=python3.12 ...'"),
        (OLD, "python3.99 is Python 3.10.13, and 3.11 or newer is needed: make PYTHON=python3.12 ..."),
    ],
)
def test_no_fitting_interpreter(python: str | None, said: str, tmp_path: Path) -> None:
    done, venv = make_venv(tmp_path, python)
    assert (done.returncode, venv.exists()) == (2, False)
    assert said in done.stderr


def test_half_an_environment_is_removed(tmp_path: Path) -> None:
    """Debian's Python without python3-venv leaves one that has no pip; the next try would take it for whole."""
    done, venv = make_venv(tmp_path, NO_VENV)
    assert (done.returncode, venv.exists()) == (2, False)
    assert "no ensurepip" in done.stderr
    assert "apt-get install python3.99-venv" in done.stderr


def test_without_the_wheel_of_torch_the_lines_to_copy_are_said(tmp_path: Path) -> None:
    done, _ = make_venv(tmp_path, PIP_FAILS, NO_TORCH)
    assert done.returncode == 2
    assert "pip finds no torch==2.13.0+cpu, " in done.stderr
    assert "\n    export PIP_EXTRA_INDEX_URL=" in done.stderr
    assert "\n    export PIP_FIND_LINKS=" in done.stderr
    assert "Then run the same command again." in done.stderr


def test_another_failure_is_not_blamed_on_torch(tmp_path: Path) -> None:
    """Negative control."""
    done, venv = make_venv(tmp_path, PIP_FAILS, "ERROR: certificate verify failed\n")
    assert done.returncode == 2
    assert "certificate verify failed" in done.stderr
    assert f"{venv}/install.log" in done.stderr
    assert "torch" not in done.stderr
