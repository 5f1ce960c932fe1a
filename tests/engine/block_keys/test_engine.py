# SPDX-License-Identifier: Apache-2.0
"""The keys of vLLM's own engine are those of the documented layout, and a later question finds them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from vllm import SamplingParams
from vllm.v1.core import kv_cache_utils

from tests.unit.components.block_keys.test_layout import by_the_book
from vllm_mmcache.base import kv_blocks
from vllm_mmcache.exactness.answers import Answer
from vllm_mmcache.exactness.conversations import filler, one, picture, user

pytestmark = [pytest.mark.engine, pytest.mark.any_engine]

CONFIG = EngineConfig("qwen3-vl")


def cached_keys(rig: ZooRig) -> set[str]:
    """The keys in the engine's block pool, without the number of the KV group behind each."""
    pool: Any = rig.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return {bytes(key)[:-4].hex() for key in pool.cached_block_hash_to_block._cache}


def keys_of(rig: ZooRig, answer: Answer, names: Sequence[str]) -> set[str]:
    """By the page of the layout: the keys of a prompt and its answer, as far as they were computed."""
    spans = zip(names, rig.image_spans(answer), strict=True)
    case = {
        "block_size": rig.block_tokens,
        "none_hash": kv_cache_utils.NONE_HASH.hex(),
        "tokens": (answer.prompt_ids + answer.token_ids)[:-1],
        "images": [(name, start, end - start) for name, (start, end) in spans],
        "lora": None,
        "salt": None,
    }
    return set(by_the_book(case))


@pytest.mark.parametrize("config", [pytest.param(CONFIG, id="qwen3-vl")])
def test_keys_of_the_engine(pool: EnginePool, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = pool.get(config)
    named: list[list[str]] = []
    add = rig.llm.llm_engine.engine_core.add_request
    monkeypatch.setattr(
        rig.llm.llm_engine.engine_core,
        "add_request",
        lambda request: (named.append([f.identifier for f in request.mm_features]), add(request))[1],
    )
    rules, shown = filler(60), picture(720)
    first = one(rig, user(rules, shown, "What is it?" + filler(40)), max_tokens=6)
    assert cached_keys(rig) == keys_of(rig, first, named[0])
    second = one(rig, user(rules, shown, "And where?" + filler(40)), max_tokens=6)
    assert cached_keys(rig) == keys_of(rig, first, named[0]) | keys_of(rig, second, named[1])
    (_, end), *_ = rig.image_spans(second)
    assert second.num_cached_tokens >= end // rig.block_tokens * rig.block_tokens, "the image, too, is found"
    other = one(rig, user(rules, picture(721), "What is it?" + filler(40)), max_tokens=6)  # negative control
    (start, _), *_ = rig.image_spans(other)
    assert other.num_cached_tokens <= start
    assert not keys_of(rig, first, ["another name"]) <= cached_keys(rig)
    rig.assert_exact([first, second, other])


SCARCE = EngineConfig(
    "qwen3-vl",
    batched_tokens=128,
    num_blocks=10,  # one of them vLLM's own, nine for 288 tokens
    max_tokens=288,
    more=(("scheduling_policy", "priority"), ("long_prefill_token_threshold", 64)),
)


@pytest.mark.parametrize("withdraws", [True, False])
def test_a_request_that_is_preempted_in_its_step_leaves_no_keys(
    pool: EnginePool, withdraws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A more important request takes a block of the step that was to compute two. The control is stock's way."""
    rig = pool.get(SCARCE)
    engine, scheduler = rig.llm.llm_engine, rig.scheduler
    preempted: list[tuple[str, int]] = []
    preempt = type(scheduler)._preempt_request

    def note(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = self.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks[request.request_id]
        preempted.append((request.request_id, len(blocks) - request.num_computed_tokens // 32))
        return preempt(self, request, *args, **kwargs)

    monkeypatch.setattr(type(scheduler), "_preempt_request", note)
    if not withdraws:
        monkeypatch.setattr(kv_blocks, "withdraw_keys", lambda *_: None)

    def answers(*requests: tuple[str, int, int, int]) -> dict[str, list[float]]:
        """Ask: name, number of tokens, tokens of the answer, priority; the next one when a step is over."""
        found: dict[str, list[float]] = {}
        waiting = list(requests)
        while waiting or engine.has_unfinished_requests():
            if waiting:
                name, num_tokens, num_answered, priority = waiting.pop(0)
                tokens = [(7 * place + 11) % 300 + 20 for place in range(num_tokens)]
                params = SamplingParams(max_tokens=num_answered, temperature=0, logprobs=1, ignore_eos=True)
                engine.add_request(name, {"prompt_token_ids": tokens}, params, priority=priority)
            for output in engine.step():
                if output.finished:
                    chosen = zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
                    found[output.request_id] = [entry[token].logprob for token, entry in chosen]
        return found

    cold = answers(("cold", 280, 3, 0))["cold"]
    assert preempted == []
    rig.llm.reset_prefix_cache()
    warm = answers(("long", 280, 3, 9), ("short", 32, 8, 0))["long"]
    assert preempted, "nobody was in the way"
    assert preempted[0][0].startswith("long")
    assert preempted[0][1] == 2, "both blocks were those of the step"
    assert np.allclose(warm, cold, atol=1e-4) == withdraws
    rig.llm.reset_prefix_cache()
