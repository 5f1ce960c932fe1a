# SPDX-License-Identifier: Apache-2.0
"""The trap of the vision tower counts, and raises where no tower may run."""

import pytest

from vllm_mmcache.models import tower_trap
from vllm_mmcache.models.tower_trap import TowerRan, no_tower


def test_it_counts() -> None:
    before = tower_trap.num_runs()
    tower_trap.spring("Model")
    assert tower_trap.num_runs() == before + 1


def test_no_tower_may_run_within() -> None:
    before = tower_trap.num_runs()
    with no_tower():
        with no_tower(), pytest.raises(TowerRan, match="tower of Model"):
            tower_trap.spring("Model")
        with pytest.raises(TowerRan):
            tower_trap.spring("Model")
    assert tower_trap.num_runs() == before
    tower_trap.spring("Model")
