# SPDX-License-Identifier: Apache-2.0
"""Each feature of vLLM in an engine of its own: components as the table says, answers those of a cold run.

CI runs a few of them, `make matrix` (TEST_MATRIX=1) all. docs/composes.md is written from the same runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import composes_page
from tests.engine.composes.features import Feature


@pytest.mark.process
def test_tests_that_do_not_run_show_nothing(tmp_path: Path) -> None:
    """Negative control of the rows that tests stand for."""
    shown = Feature("dp2", "", shown_by="tests/unit/base/test_status.py")
    lost = Feature("tp2", "", shown_by="tests/unit/base/test_status.py::test_that_nobody_wrote")
    assert [bool(row.failed) for row in composes_page.record_tests([shown], "v1", tmp_path)] == [False]
    assert [bool(row.failed) for row in composes_page.record_tests([shown, lost], "v1", tmp_path)] == [False, True]
