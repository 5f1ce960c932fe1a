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
from vllm_mmcache.base import engine_caches, status
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


def text_of(num_tokens: int) -> dict[str, Any]:
    return {"prompt_token_ids": [(7 * place + 11) % 300 + 20 for place in range(num_tokens)]}


def answers(rig: ZooRig, *requests: tuple[str, dict[str, Any], int, int]) -> dict[str, list[float]]:
    """Ask: name, prompt, tokens of the answer, priority; the next one when a step is over."""
    engine, found, waiting = rig.llm.llm_engine, dict[str, list[float]](), list(requests)
    while waiting or engine.has_unfinished_requests():
        if waiting:
            name, prompt, num_answered, priority = waiting.pop(0)
            params = SamplingParams(max_tokens=num_answered, temperature=0, logprobs=1, ignore_eos=True)
            engine.add_request(name, prompt, params, priority=priority)
        for output in engine.step():
            if output.finished:
                chosen = zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
                found[output.request_id] = [entry[token].logprob for token, entry in chosen]
    return found


@pytest.fixture
def preempted(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, set[int]]]:
    """Of each preempted request: its name, blocks that nobody has computed, and images whose outputs it holds."""
    scheduler = pool.get(SCARCE).scheduler
    found: list[tuple[str, int, set[int]]] = []
    preempt = type(scheduler)._preempt_request

    def note(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = self.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks[request.request_id]
        images = set(self.encoder_cache_manager.get_cached_input_ids(request))
        found.append((request.request_id[:4], len(blocks) - request.num_computed_tokens // 32, images))
        return preempt(self, request, *args, **kwargs)

    monkeypatch.setattr(type(scheduler), "_preempt_request", note)
    return found


@pytest.mark.parametrize("withdraws", [True, False])
def test_a_request_that_is_preempted_in_its_step_leaves_no_keys(
    pool: EnginePool, preempted: list[Any], withdraws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A more important request takes a block of the step that was to compute two. The control is stock's way."""
    rig = pool.get(SCARCE)
    if not withdraws:
        monkeypatch.setattr(engine_caches, "withdraw_keys", lambda *_: None)
    cold = answers(rig, ("cold", text_of(280), 3, 0))["cold"]
    assert preempted == []
    rig.llm.reset_prefix_cache()
    warm = answers(rig, ("long", text_of(280), 3, 9), ("short", text_of(32), 8, 0))["long"]
    assert preempted[0] == ("long", 2, set()), "both blocks were those of the step"
    assert np.allclose(warm, cold, atol=1e-4) == withdraws
    rig.llm.reset_prefix_cache()


@pytest.mark.parametrize("withdraws", [True, False])
def test_a_request_that_is_preempted_in_its_step_leaves_no_image(
    pool: EnginePool, preempted: list[Any], withdraws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, in the step that was to encode its image: without its output, the engine ends, as stock's does."""
    rig = pool.get(SCARCE)
    if not withdraws:
        monkeypatch.setattr(engine_caches, "uncomputed_outputs", lambda *_: set())
    monkeypatch.setitem(status._is_on, "features", False)  # which may have the image, and send it along
    text, images = rig.render([user(filler(190), picture(5), "What is it?" + filler(12))])
    prompt = {"prompt": text, "multi_modal_data": {"image": list(images)}}
    cold = answers(rig, ("cold", prompt, 3, 0))["cold"]
    rig.make_cold()
    requests = ("long", prompt, 3, 9), ("short", text_of(32), 8, 0)
    if withdraws:
        assert np.allclose(answers(rig, *requests)["long"], cold, atol=1e-4)
        rig.make_cold()
    else:
        with pytest.raises(RuntimeError, match="Encoder cache miss"):
            answers(rig, *requests)
        pool.close()
    assert preempted[0] == ("long", 2, {0}), "its image was to be encoded in the step"
