# SPDX-License-Identifier: Apache-2.0
"""The scheduler's components where a step is scheduled before the tokens of the last one are known.

That is so with TEST_ENGINE=v2-async; elsewhere the same must hold, and no step is ahead of its tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from mmcache_tools.harness.scenarios import full_blocks

from tests.engine.image_spans.arrivals import Arrival, Engine, limited
from tests.support.engine_configuration import CHOSEN
from vllm_mmcache.exactness.answers import Answer
from vllm_mmcache.exactness.conversations import filler, picture, user
from vllm_mmcache.prove.load import counted

pytestmark = [pytest.mark.engine, pytest.mark.any_engine]

LIMIT_S = 300.0  # of each request
FAMILIES = ("gemma3", "qwen3.5")  # whose KV cache keeps states sparsely
# The image and the question behind it don't fit a step, so a prefill takes several.
IN_CHUNKS = [
    EngineConfig("gemma3", batched_tokens=96),
    EngineConfig("qwen3-vl", batched_tokens=48),
    EngineConfig("qwen3.5", batched_tokens=224),
]


def ids(configs: list[EngineConfig]) -> list[str]:
    return [config.family for config in configs]


def answers_of(*ones: Arrival) -> list[Answer]:
    assert [one.state for one in ones] == ["answered"] * len(ones)
    return [one.answer for one in ones if one.answer is not None]


def request_of(engine: Engine, one: Arrival) -> Any:
    """The scheduler's request of an arrival that is not settled."""
    (found,) = [r for r in engine.scheduler.requests.values() if engine.arrivals.get(r.request_id) is one]
    return found


@pytest.mark.parametrize("config", [EngineConfig(family) for family in FAMILIES], ids=FAMILIES)
def test_the_second_question_is_a_hit_while_the_first_is_answered(pool: EnginePool, config: EngineConfig) -> None:
    """The checkpoint at the image's end is there as soon as the first answer has begun."""
    rig = pool.get(config)
    with limited(rig) as engine, counted(rig) as counts:
        first = engine.put(user(filler(150), picture(90), "What is it?" + filler(30)), max_tokens=8)
        while first.first_token_at_step < 0:
            engine.step()
        second = engine.put(user(filler(150), picture(90), "How many of them are there?" + filler(40)))
        other = engine.put(user(filler(150), picture(91), "What is it?" + filler(30)))
        engine.until_done([first, second, other], LIMIT_S)
    answers = answers_of(first, second, other)
    start, end = rig.image_spans(answers[1])[0]
    assert answers[1].num_cached_tokens == full_blocks(rig, end) > start
    assert answers[2].num_cached_tokens <= start
    assert (counts["ahead"] > 0) == CHOSEN.is_async
    rig.assert_exact(answers)


@pytest.mark.parametrize("config", IN_CHUNKS[:2], ids=ids(IN_CHUNKS[:2]))
def test_chunks_and_images(pool: EnginePool, config: EngineConfig) -> None:
    """Where images are causal, chunks end inside them; where they attend both ways, none does. Both are exact."""
    rig = pool.get(config)
    with counted(rig) as counts:
        answers = rig.ask(*([user(filler(20), picture(n), picture(n + 1), "Compare.")] for n in (92, 93)), max_tokens=4)
    assert (counts["split"] > 0) == (config.family == "qwen3-vl")
    assert (counts["ahead"] > 0) == CHOSEN.is_async
    rig.assert_exact(answers)


def held(rig: ZooRig) -> tuple[int, int]:
    """KV blocks and encoder outputs that requests hold."""
    scheduler = Engine(rig).scheduler
    pool = scheduler.kv_cache_manager.block_pool
    outputs = sum(bool(requests) for requests in scheduler.encoder_cache_manager.cached.values())
    return pool.num_gpu_blocks - pool.get_num_free_blocks(), outputs


@pytest.mark.parametrize("when", ["in the prefill", "while it is answered"])
@pytest.mark.parametrize("config", IN_CHUNKS, ids=ids(IN_CHUNKS))
def test_aborted_requests(pool: EnginePool, config: EngineConfig, when: str) -> None:
    """What they leave behind in the caches is right, and they hold nothing."""
    rig = pool.get(config)
    before = held(rig)
    begin, rest = filler(150), filler(40)
    with limited(rig) as engine:
        gone = [engine.put(user(begin, picture(n), "What is it?" + rest), max_tokens=40) for n in (94, 95)]
        if when == "in the prefill":
            engine.step()
            while (request := request_of(engine, gone[0])).num_computed_tokens < len(filler(150).split()):
                engine.step()
            assert request.num_computed_tokens < request.num_prompt_tokens
        else:
            while gone[0].first_token_at_step < 0:
                engine.step()
            engine.step()
        assert held(rig) > before
        engine.abort(*gone)
        ones = [engine.put(user(begin, picture(n), "And now?" + rest)) for n in (95, 94, 96)]
        engine.until_done(ones, LIMIT_S)
        again = [engine.put(user(begin, picture(n), "What is it?" + rest)) for n in (94, 95)]
        engine.until_done(again, LIMIT_S)
    answers = answers_of(*ones, *again)
    assert held(rig) == before
    assert any(answer.num_cached_tokens for answer in answers)
    rig.assert_exact(answers)
