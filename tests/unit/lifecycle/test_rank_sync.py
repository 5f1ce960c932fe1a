# SPDX-License-Identifier: Apache-2.0
"""What the engine tells its ranks of each other, in one process that is one of them."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mmcache.base import status
from vllm_mmcache.base.status import ON, State
from vllm_mmcache.lifecycle import rank_sync

pytestmark = pytest.mark.usefixtures("no_role")

OFF, NOTHING = State("off", "a reason"), State("unneeded", "no images")


def test_a_rank_is_told_what_is_off_in_another_one() -> None:
    """This process is rank 0. Rank 1 is a process without the component."""
    for role in ("engine", "worker"):
        status.begin(role)
        status.put(role, "metrics", ON)
        status.put(role, "features", NOTHING)
    asked = []

    class Executor:
        def collective_rpc(self, question: Any) -> list[Any]:
            asked.append(question)
            other = rank_sync.as_plain_data({"metrics": OFF, "features": NOTHING})
            return [question(SimpleNamespace(rank=0)), (1, other)]

    found, _ = rank_sync._settle(Executor(), rank_sync.NOT_YET)
    assert len(asked) == 2
    told = State("off", "a reason (worker 1)")
    assert status.of("worker")["metrics"] == told == status.of("engine")["metrics"] == found[0]["metrics"]
    assert status.of("worker")["features"] == NOTHING
