# SPDX-License-Identifier: Apache-2.0
"""`make soak`: its tests are there, larger than in CI, and its counts are those of the reports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.results import ROOT
from scripts import soak

CODE = "from tests.support.sizes import scaled; print(scaled(10))"


def test_the_tests_are_there() -> None:
    named = [one for _, tests in soak.TESTS.values() for one in tests.split() if one.endswith(".py")]
    assert named
    assert all((ROOT / one).is_file() for one in named)


@pytest.mark.process
def test_the_scale_reaches_the_tests() -> None:
    environ = os.environ | {"TEST_SCALE": "3"}
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.stdout == "30\n", done.stderr


@pytest.mark.process
def test_a_run_that_collects_nothing_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 4 of pytest, with no test that failed; and one part leaves the others in the result."""
    monkeypatch.setattr(soak, "OUTPUT", tmp_path)
    monkeypatch.setattr(soak, "RESULT", tmp_path / "soak.json")
    monkeypatch.setitem(soak.TESTS, "lost", (2, "tests/no_such_file.py"))
    found = soak.run("lost")
    assert (found["passed"], found["failed"]) == (0, 1)
    assert found["command"] == "TEST_SCALE=2 python -m pytest -q --timeout=3600 tests/no_such_file.py"
    soak.keep("memory", {"failed": 0})
    soak.keep("load", found)
    assert list(json.loads(soak.RESULT.read_text())) == ["load", "memory"]
