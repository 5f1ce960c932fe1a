# SPDX-License-Identifier: Apache-2.0
"""In which configurations a state can be kept inside a chunk."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mmcache.components.inner_checkpoints.rules import state_in


def configuration(**chosen: Any) -> Any:
    given = {"is_hybrid": True, "caching": True, "speculative": None, "transfer": None} | chosen
    parallel = {"use_ubatching": False, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    return SimpleNamespace(
        model_config=SimpleNamespace(is_hybrid=given["is_hybrid"]),
        cache_config=SimpleNamespace(enable_prefix_caching=given["caching"]),
        speculative_config=given["speculative"],
        kv_transfer_config=given["transfer"],
        parallel_config=SimpleNamespace(**{name: chosen.get(name, value) for name, value in parallel.items()}),
    )


def test_a_hybrid_model_with_prefix_caching_has_it() -> None:
    assert state_in(configuration()) is None


@pytest.mark.parametrize(
    ("chosen", "state", "why"),
    [
        ({"is_hybrid": False}, "unneeded", "no Mamba layers"),
        ({"caching": False}, "unneeded", "prefix caching is off"),
        ({"speculative": object()}, "off", "speculative decoding"),
        ({"transfer": object()}, "off", "KV connector"),
        ({"use_ubatching": True}, "off", "two halves"),
        ({"decode_context_parallel_size": 2}, "off", "context parallelism"),
    ],
)
def test_elsewhere_it_says_why_not(chosen: dict[str, Any], state: str, why: str) -> None:
    found = state_in(configuration(**chosen))
    assert found is not None
    assert (found.state, why in found.reason) == (state, True)
