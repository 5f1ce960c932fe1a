# SPDX-License-Identifier: Apache-2.0
"""The keys of vLLM's own engine are those of the documented layout, and a later question finds them."""

from collections.abc import Sequence
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from vllm.v1.core import kv_cache_utils

from tests.unit.components.block_keys.test_layout import by_the_book
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
