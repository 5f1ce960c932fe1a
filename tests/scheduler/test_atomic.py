# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 under load: no span is ever split, every request finishes, every answer is that of a cold run.

64 requests with shared prefixes and pictures, a small token budget and a KV cache so small that requests are
preempted. The negative control lets the same engine split spans: then it does, and its answers are wrong.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.exactness.engines import Answer, EngineConfig, EnginePool, Rig
from tests.exactness.expect import TOLERANCE, Inexact, assert_exact
from tests.exactness.scenarios import filler, picture, user
from tests.sizes import SCALE, scaled
from vllm_mmcache.scheduler import vllm_side

pytestmark = pytest.mark.engine

LOAD = EngineConfig("gemma3", batched_tokens=96, num_blocks=64, num_seqs=8, max_tokens=512)
ADJACENT = EngineConfig("gemma3", batched_tokens=100, max_tokens=1024)


def conversations(count: int, seed: int) -> list[Any]:
    """Few pictures and few texts in many orders, so that prefixes are shared and hits end inside images."""
    rng = random.Random(seed)
    return [
        [
            user(
                filler(rng.choice([3, 17, 40]), start=rng.randint(0, 1)),
                *(picture(rng.randint(0, 3)) for _ in range(rng.randint(0, 3))),
                filler(rng.randint(1, 30), start=rng.randint(0, 9)),
            )
        ]
        for _ in range(count)
    ]


@contextmanager
def counted(rig: Rig) -> Iterator[dict[str, int]]:
    """Counts the steps and the spans that a step's end splits, from what the scheduler really put into each step."""
    scheduler = rig.llm.llm_engine.engine_core.engine_core.scheduler
    counts = {"steps": 0, "tokens": 0, "split": 0}
    original = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        counts["steps"] += 1
        counts["tokens"] += output.total_num_scheduled_tokens
        for request_id in output.num_scheduled_tokens:
            request = scheduler.requests[request_id]
            end = request.num_computed_tokens  # vLLM advances it when it schedules
            spans = vllm_side.image_spans(request) if request.mm_features else []
            counts["split"] += sum(first < end <= last for first, last in spans)
        return output

    scheduler.schedule = schedule
    try:
        yield counts
    finally:
        del scheduler.schedule


def run(rig: Rig, count: int, seed: int) -> list[Answer]:
    lengths = [random.Random(seed + i).randint(1, 12) for i in range(count)]
    return rig.ask(*conversations(count, seed), max_tokens=lengths)


def test_no_span_is_split_under_load(pool: EnginePool) -> None:
    rig = pool.get(LOAD)
    before = rig.num_preemptions()
    with counted(rig) as counts:
        answers = [answer for seed in range(1, 1 + SCALE) for answer in run(rig, 64, seed)]
    assert len(answers) == scaled(64)
    assert counts["steps"] > scaled(100)
    assert counts["split"] == 0
    assert rig.num_preemptions() > before, "the KV cache is not small enough for this test to mean anything"
    assert any(answer.num_cached_tokens for answer in answers)
    assert assert_exact(rig, answers) <= TOLERANCE


def test_without_atomic_spans_answers_are_wrong(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: only vLLM's own guard, which 0.32 has for one of the cases."""
    rig = pool.get(LOAD)
    monkeypatch.setattr(vllm_side, "whole_spans", lambda start, num_new_tokens, spans: num_new_tokens)
    with counted(rig) as counts:
        answers = run(rig, 64, seed=1)
    assert counts["split"] > 0
    with pytest.raises(Inexact):
        assert_exact(rig, answers)


def test_adjacent_images_with_a_small_encoder_cache_finish(pool: EnginePool) -> None:
    """Stock 0.32 never finishes this request: the encoder cache holds one image and a half."""
    rig = pool.get(ADJACENT)
    engine = rig.llm.llm_engine
    assert engine.engine_core.engine_core.scheduler.encoder_cache_manager.cache_size < 2 * 64
    for count in (2, 4):
        answers = rig.ask([user(*(picture(i) for i in range(count)), "compare")])
        assert assert_exact(rig, answers) <= TOLERANCE
