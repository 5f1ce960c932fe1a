# SPDX-License-Identifier: Apache-2.0
"""What an engine's own cold runs show, and that warm answers of a mixture of experts in bfloat16 are judged by it.

There a rounding that differs can send a token to another expert, so log-probabilities of right answers differ by far
more than in float32. What is allowed has to be more than that, and less than what a wrong picture does.
"""

from dataclasses import replace
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig

from vllm_mmcache.exactness.answers import Inexact, assert_near
from vllm_mmcache.exactness.conversations import filler, one, picture, user
from vllm_mmcache.exactness.distance import FLOOR, TIMES_COLD

pytestmark = [pytest.mark.engine, pytest.mark.answers]

MOE = EngineConfig("qwen3-vl-moe", precision="bfloat16")


@pytest.fixture
def rig(pool: EnginePool) -> ZooRig:
    return pool.get(MOE)


def question(number: int) -> Any:
    return user(filler(60), picture(number), "What is in this picture?" + filler(12))


def test_cold_runs_end_their_steps_elsewhere(rig: ZooRig) -> None:
    """The second one has a step more, and what it shows is kept."""
    steps: list[int] = []
    schedule = rig.scheduler.schedule

    def noting(*args: Any, **kwargs: Any) -> Any:
        step = schedule(*args, **kwargs)
        steps.extend(step.num_scheduled_tokens.values())
        return step

    rig.scheduler.schedule = noting
    try:
        answer = one(rig, question(1), max_tokens=1)
        steps.clear()
        runs = rig.cold_runs(answer)
        assert rig.scheduler.schedule is noting
    finally:
        del rig.scheduler.schedule
    length = len(answer.prompt_ids)
    assert len(runs) == 2
    prefills = [tokens for tokens in steps if tokens]
    assert prefills[0] == length
    assert 0 < prefills[1] < length
    assert prefills[1] + prefills[2] == length


def test_warm_answers_are_as_near_as_cold_ones(rig: ZooRig) -> None:
    one(rig, question(2))
    warm = one(rig, question(2))
    assert warm.num_cached_tokens > 0
    rig.assert_equals_own_cold_run([warm])
    assert rig.bound == max(FLOOR, TIMES_COLD * rig.noise)


def test_an_answer_about_another_picture_is_not(rig: ZooRig) -> None:
    """Negative control: it is outside of what cold runs of both questions show."""
    first, other = (one(rig, question(number)) for number in (3, 4))
    runs = rig.cold_runs(first)
    rig.cold_runs(other)
    with pytest.raises(Inexact, match="is allowed"):
        assert_near(replace(other, prompt_ids=first.prompt_ids), runs, rig.bound, "its own cold runs")
