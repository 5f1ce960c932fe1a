# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at images on a hybrid model that drafts with MTP, on model runner V2: each token is that of a cold run.

The head agrees with its model most of the time, so drafts are accepted and rejected. Requests join and leave while
others decode, images are shared, conversations go on, few blocks are free, and requests are given up once they were
scheduled. Negative controls: faults in vLLM's copies of Mamba states and in its counts of accepted tokens are noticed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.harness.tolerances import BF16_SELF_TOLERANCE

from tests.support.engine_configuration import CHOSEN
from tests.support.sizes import larger

pytestmark = [
    pytest.mark.engine,
    pytest.mark.interpreter,
    pytest.mark.skipif(not CHOSEN.is_async, reason="no component is proven on V2 with synchronous scheduling"),
]


def asked(scratch: Path, phases: list[dict[str, Any]], **task: Any) -> list[Any]:
    """What the worker found, of each phase."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MMCACHE_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.speculative.image_worker"],
        input=json.dumps({"scratch": str(scratch), "phases": phases} | task),
        env=environ, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads(done.stdout.strip().splitlines()[-1])
    for phase, counts in zip(phases, found, strict=True):
        print(phase, {name: value for name, value in counts.items() if name != "answers"})
        print([(one["cached"], one["length"], round(max(one["errors"]), 2)) for one in counts["answers"]])
    return found


def far(found: Any) -> list[int]:
    """The requests whose answer has a token that is not the cold one."""
    return [one["number"] for one in found["answers"] if max(one["errors"]) > BF16_SELF_TOLERANCE]


def assert_right(found: Any) -> None:
    """Drafts were accepted and rejected, checkpoints made and used, and no answer is another one."""
    assert found["state"] == "on"
    assert found["draft_tokens"] / 2 < found["accepted_tokens"] < found["draft_tokens"]
    assert found["checkpoints_made"] > 1
    assert found["checkpoints_used"] > 2
    assert far(found) == []


def test_answers_are_cold_ones_and_faults_are_noticed(tmp_path: Path) -> None:
    right, precopy, count = asked(
        tmp_path,
        [
            {"num_requests": 6, "aborts": True},
            {"num_requests": 3, "fault": "precopy"},
            {"num_requests": 3, "fault": "count"},
        ],
    )
    assert_right(right)
    assert len(far(precopy)) > 1
    assert len(far(count)) > 1


@larger
@pytest.mark.parametrize("num_drafted", [1, 2, 3])
@pytest.mark.parametrize("small_steps", [False, True])
def test_more_of_it(tmp_path: Path, num_drafted: int, small_steps: bool) -> None:
    """More requests in another order, prompts in one step and in several, and so few blocks that some are preempted."""
    found = asked(
        tmp_path,
        [{"num_requests": 24, "aborts": True, "seed": 1}, {"num_requests": 24, "seed": 2}],
        num_drafted=num_drafted, num_blocks=30, num_seqs=4, batched_tokens=224 if small_steps else 2048,
    )  # fmt: skip
    for phase in found:
        assert_right(phase)
    assert sum(phase["preemptions"] for phase in found) > 0


@larger
def test_without_checkpoints_fewer_are_hits(tmp_path: Path) -> None:
    """Negative control of what is reused; and drafts are accepted as they were."""
    on, off = asked(tmp_path, [{}, {"is_on": False}])
    assert sum(one["cached"] for one in on["answers"]) > sum(one["cached"] for one in off["answers"])
    assert off["checkpoints_made"] == 0
    assert far(off) == []
    assert abs(on["accepted_tokens"] / on["draft_tokens"] - off["accepted_tokens"] / off["draft_tokens"]) < 0.1


@larger
def test_a_state_that_is_not_kept_at_a_boundary_is_noticed(tmp_path: Path) -> None:
    """Negative control: the state at the end of a block that was filled while decoding isn't kept there."""
    (found,) = asked(tmp_path, [{"num_requests": 24, "fault": "boundary"}])
    assert far(found)
