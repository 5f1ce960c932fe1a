# SPDX-License-Identifier: Apache-2.0
"""Which layers of vLLM the naive form computes, and that it says of the others why not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention import Attention, ChunkedLocalAttention

from vllm_mmcache.reference_attention.vllm_layers import ReferenceLayers


class Prefixed(Attention):
    """A subclass may mask otherwise."""


@pytest.mark.parametrize(
    ("kind", "impl", "cache_dtype", "why"),
    [
        (Attention, {}, "auto", ""),
        (Attention, {"dcp_world_size": 1}, "bfloat16", ""),
        (Attention, {"dcp_world_size": 2}, "auto", "each of 2 ranks has a part of its KV cache"),
        (Attention, {"sinks": torch.zeros(2)}, "auto", "it has attention sinks"),
        (Attention, {"alibi_slopes": torch.zeros(2)}, "auto", "it has ALiBi"),
        (Attention, {}, "fp8", "its KV cache is fp8"),
        (ChunkedLocalAttention, {}, "auto", "it is a ChunkedLocalAttention"),
        (Prefixed, {}, "auto", "it is a Prefixed"),
    ],
)
def test_what_it_does_not_compute(
    monkeypatch: pytest.MonkeyPatch, kind: type[Attention], impl: dict[str, Any], cache_dtype: str, why: str
) -> None:
    layer: Any = object.__new__(kind)
    vars(layer).update(
        layer_name="layers.0", impl=SimpleNamespace(**impl), kv_cache_dtype=cache_dtype, dtype=torch.bfloat16
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=None, is_mm_prefix_lm=False),
        compilation_config=SimpleNamespace(cudagraph_mode=None),
    )
    layers = ReferenceLayers(SimpleNamespace(vllm_config=config))
    monkeypatch.setattr(layers, "_layers", lambda: iter([layer]))
    assert layers.why_unusable() == (f"layer layers.0: {why}" if why else "")
