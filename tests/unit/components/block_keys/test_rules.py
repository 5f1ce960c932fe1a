# SPDX-License-Identifier: Apache-2.0
"""Under which configurations block keys are vLLM's own, as the server and `mmcache doctor` say it."""

from types import SimpleNamespace

import pytest

from vllm_mmcache.base.status import State
from vllm_mmcache.components.block_keys.layouts import layout_report
from vllm_mmcache.components.block_keys.rules import state_in


def state(algorithm: str, *, is_cached: bool = True, **more: int) -> State | None:
    cache = SimpleNamespace(enable_prefix_caching=is_cached, prefix_caching_hash_algo=algorithm)
    return state_in(SimpleNamespace(cache_config=cache, **more))


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_ours(algorithm: str) -> None:
    assert state(algorithm) is None
    assert state(algorithm, num_hash_lookahead_tokens=0) is None
    assert state(algorithm, is_cached=False) == State("unneeded", "prefix caching is off")


@pytest.mark.parametrize(("algorithm", "num_ahead"), [("sha256_cbor", 0), ("xxhash_cbor", 0), ("sha256", 2)])
def test_vllms_own_for_the_reason_that_the_engine_says(algorithm: str, num_ahead: int) -> None:
    _, why = layout_report(algorithm, num_lookahead_tokens=num_ahead)
    assert state(algorithm, num_hash_lookahead_tokens=num_ahead) == State("off", why)
