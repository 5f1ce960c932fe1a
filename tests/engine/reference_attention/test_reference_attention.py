# SPDX-License-Identifier: Apache-2.0
"""Engines whose attention is the naive form answer as they should, and rows of their kernels are compared with it."""

from collections.abc import Iterator
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig

from vllm_mmcache.components.image_spans import vllm_backend
from vllm_mmcache.exactness.conversations import filler, one, picture, user
from vllm_mmcache.reference_attention import vllm_layers
from vllm_mmcache.reference_attention.comparison import AFTER_HIT, DECODE, PICTURE, PREFILL, Comparison
from vllm_mmcache.reference_attention.vllm_layers import ReferenceLayers, computed_naively

pytestmark = pytest.mark.engine

# Gemma 3 has both kinds of layers, and images that attend both ways in each; it is run on V2, too.
FAMILIES = ["qwen3-vl", pytest.param("gemma3", marks=[pytest.mark.any_engine]), "gemma4", "qwen3.5"]
ASK = user(filler(60), picture(34), picture(35), "Compare.")
AGAIN = user(filler(60), picture(34), picture(35), "And now the other way round. " * 8)


@pytest.fixture
def comparisons() -> Iterator[list[Comparison]]:
    """Those that are under way, which end with the test."""
    found: list[Comparison] = []
    yield found
    for comparison in found:
        comparison.end()


def compare(rig: ZooRig, comparisons: list[Comparison]) -> dict[str, Any]:
    """What is seen of a question that is computed whole, and one on what it leaves."""
    cold = one(rig, ASK)
    rig.make_cold()
    comparisons.append(Comparison(rig.runner, [(start, end - 1) for start, end in rig.image_spans(cold)]))
    one(rig, ASK)
    hit = one(rig, AGAIN)
    assert hit.num_cached_tokens > 0
    return comparisons.pop().end()


@pytest.mark.parametrize("family", FAMILIES)
def test_its_answers_are_exact(pool: EnginePool, family: str) -> None:
    """Cold, on what a kernel has left in the cache, and on what it has left itself."""
    rig = pool.get(EngineConfig(family))
    assert ReferenceLayers(rig.runner).why_unusable() == ""
    fast = one(rig, ASK)
    with computed_naively(rig.runner):
        warm = one(rig, AGAIN)
        rig.make_cold()
        cold = one(rig, ASK)
        again = one(rig, AGAIN)
    assert warm.num_cached_tokens > 0
    assert again.num_cached_tokens > 0
    rig.assert_exact([fast, warm, cold, again])


def test_a_few_rows_at_a_time(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of long sequences."""
    monkeypatch.setattr(vllm_layers, "MOST_SCORES", 1 << 12)
    rig = pool.get(EngineConfig("gemma3"))
    with computed_naively(rig.runner):
        rig.assert_exact([one(rig, ASK)])


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_are_right(pool: EnginePool, comparisons: list[Comparison], family: str) -> None:
    seen = compare(pool.get(EngineConfig(family)), comparisons)
    assert (seen["wrong"], seen["unread"]) == ({}, "")
    assert all(seen["rows"][kind] > 0 for kind in (DECODE, PICTURE, AFTER_HIT, PREFILL))


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_causal_images_are_seen(
    pool: EnginePool, comparisons: list[Comparison], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the kernel lets images attend as text does."""
    monkeypatch.setattr(vllm_backend, "cut_step", lambda starts, ends, spans: None)
    seen = compare(pool.get(EngineConfig(family)), comparisons)
    assert set(seen["wrong"]) == {PICTURE}


@pytest.mark.parametrize(
    ("kind", "is_of_kind"),
    [(DECODE, lambda rows: rows == 1), (AFTER_HIT, lambda rows: rows > 1)],
    ids=["decode", "hit"],
)
def test_a_wrong_kernel_is_seen(
    pool: EnginePool, comparisons: list[Comparison], kind: str, is_of_kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: one layer forgets the first block of the cache, in steps that go on from it."""
    rig = pool.get(EngineConfig("qwen3-vl"))
    (group,) = (group for groups in rig.runner.attn_groups for group in groups)
    name = group.layer_names[-1]
    impl = rig.vllm_config.compilation_config.static_forward_context[name].impl
    forward = impl.forward

    def forgetful(layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, *a: Any, **more: Any) -> Any:
        if metadata is None or not is_of_kind(len(query)) or int(metadata.seq_lens[0]) == len(query):
            return forward(layer, query, key, value, cache, metadata, *a, **more)
        first = int(metadata.block_table[0, 0])
        kept = cache[first].clone()
        cache[first] = 0
        try:
            return forward(layer, query, key, value, cache, metadata, *a, **more)
        finally:
            cache[first] = kept

    monkeypatch.setattr(impl, "forward", forgetful, raising=False)
    seen = compare(rig, comparisons)
    assert {kind} <= set(seen["wrong"]) <= {kind, PICTURE}, "a picture may come after a cached prefix"
    assert seen["wrong"][kind].startswith(f"layer {name}, token ")


def test_layers_are_as_they_were(pool: EnginePool, comparisons: list[Comparison]) -> None:
    rig = pool.get(EngineConfig("gemma3"))
    owners = [builder for groups in rig.runner.attn_groups for group in groups for builder in group.metadata_builders]
    owners += [layer.impl for layer in rig.vllm_config.compilation_config.static_forward_context.values()]
    before = [set(vars(owner)) for owner in owners]
    with computed_naively(rig.runner):
        compare(rig, comparisons)
        assert any("forward" in vars(owner) for owner in owners), "those of the outer one are still there"
    assert [set(vars(owner)) for owner in owners] == before


def test_whole_graphs_are_refused(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CUDAGraphMode

    rig = pool.get(EngineConfig("gemma3"))
    monkeypatch.setattr(rig.vllm_config.compilation_config, "cudagraph_mode", CUDAGraphMode.FULL_AND_PIECEWISE)
    assert (
        ReferenceLayers(rig.runner)
        .why_unusable()
        .startswith("cudagraph_mode is FULL_AND_PIECEWISE, which runs whole steps in a graph")
    )
