# SPDX-License-Identifier: Apache-2.0
"""Every answer of the engine is that of a cold run: tokens, and log-probabilities to 1e-3 in float32.

Parametrised over engine configurations and scenarios, configuration by configuration, since starting an engine is
most of the time.
"""

from __future__ import annotations

from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool
from mmcache_tools.harness.oracle import assert_detects
from mmcache_tools.harness.scenarios import (  # fmt: skip
    MAIN,
    Scenario,
    eight_at_once,
    ends_around_block_edge,
    image_on_later_turn,
    preempted,
    preempted_soon,
    same_again,
    swapped_image,
    swapped_order,
    text_turn,
)
from mmcache_tools.zoo import FIRST_FAMILIES

from tests.support.sizes import larger
from vllm_mmcache.exactness.answers import Inexact
from vllm_mmcache.exactness.conversations import filler, one, picture, user  # fmt: skip

pytestmark = pytest.mark.engine

SMALL_BUDGET = (same_again, text_turn, swapped_image, swapped_order, eight_at_once)
BLOCK_SIZES = (same_again, text_turn, image_on_later_turn, swapped_image, ends_around_block_edge)

MATRIX: tuple[tuple[EngineConfig, str, tuple[Scenario, ...]], ...] = (
    *((EngineConfig(family), "main", MAIN) for family in FIRST_FAMILIES),
    # Budget below one picture and question: prefills are split, also inside a picture.
    (EngineConfig("qwen3-vl", batched_tokens=48), "budget48", SMALL_BUDGET),
    (EngineConfig("qwen3-vl", block_tokens=64), "block64", BLOCK_SIZES),
    (EngineConfig("qwen3-vl", block_tokens=128), "block128", BLOCK_SIZES),
    # Eight requests of 3 blocks at the start and 6 at the end (some shared) meet 33 usable blocks.
    (EngineConfig("qwen3-vl", num_blocks=34, num_seqs=8, max_tokens=1024), "tiny", (preempted,)),
    # One image of 64 tokens fits such a step, two do not.
    (EngineConfig("gemma3", batched_tokens=96), "budget96", SMALL_BUDGET),
    (EngineConfig("gemma3", block_tokens=128), "block128", BLOCK_SIZES),
    (EngineConfig("gemma3", num_blocks=100, num_seqs=8, max_tokens=512), "tiny", (preempted,)),
    # A hybrid block holds 160 tokens, and each request holds GDN states besides.
    (EngineConfig("qwen3.5", num_blocks=30, num_seqs=8, max_tokens=640), "tiny", (preempted, preempted_soon)),
)


# What CI runs on model runner V2, too, whose interpreter is slow: the scenarios that cross a cache, at one block size.
CROSSING = (same_again, text_turn, image_on_later_turn, swapped_image, swapped_order, preempted, preempted_soon)


def marks(config: EngineConfig, name: str, scenario: Scenario) -> Any:
    takes_minutes = config.family == "qwen3.5" and scenario is preempted
    in_ci = scenario in CROSSING and not name.startswith("block") and not takes_minutes
    if (config.family == "gemma3" and name == "block128") or name == "block64":
        return larger
    return pytest.mark.any_engine if in_ci else ()


CASES = [
    pytest.param(
        config, scenario, id=f"{config.family}-{name}-{scenario.__name__}", marks=marks(config, name, scenario)
    )
    for config, name, scenarios in MATRIX
    for scenario in scenarios
]


@pytest.mark.parametrize(("config", "scenario"), CASES)
def test_equals_cold_run(pool: EnginePool, config: EngineConfig, scenario: Scenario) -> None:
    rig = pool.get(config)
    delta = rig.assert_exact(scenario(rig))
    print(f"max |delta logprob| {delta:.1e}")  # shown by pytest -rP


@pytest.mark.any_engine
@pytest.mark.parametrize("config", [EngineConfig(f) for f in FIRST_FAMILIES], ids=FIRST_FAMILIES)
def test_wrong_picture_is_detected(pool: EnginePool, config: EngineConfig) -> None:
    """Negative control: an answer about one picture, judged as one about another, is far out of tolerance."""
    rig = pool.get(config)
    asks = [[user(filler(60), picture(n), "What is in this picture?")] for n in (30, 31)]
    answers = rig.ask(*asks)
    rig.assert_exact(answers)
    assert_detects(answers[0], answers[1], rig.oracle)
    assert_detects(answers[1], answers[0], rig.oracle)


@pytest.mark.any_engine
@pytest.mark.parametrize("config", [EngineConfig("qwen3-vl")], ids=["qwen3-vl"])
def test_spoiled_kv_is_detected(pool: EnginePool, config: EngineConfig) -> None:
    """Negative control: a hit on blocks that hold other values fails, so hits really read the cache."""
    rig = pool.get(config)
    ask = user(filler(100), picture(32), "What is in this picture?")
    rig.assert_exact([one(rig, ask)])
    for layer in rig.kv_tensors():
        layer.mul_(0.9)
    hit = one(rig, ask)
    assert hit.num_cached_tokens > 0
    with pytest.raises(Inexact):
        rig.assert_exact([hit])


@pytest.mark.any_engine
@pytest.mark.parametrize("config", [EngineConfig("gemma3")], ids=["gemma3"])
def test_causal_images_are_detected(pool: EnginePool, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the step not cut at image spans, as on stock vLLM, Gemma 3 is wrong."""
    from vllm_mmcache.components.image_spans import vllm_backend

    monkeypatch.setattr(vllm_backend, "cut_step", lambda starts, ends, spans: None)
    rig = pool.get(config)
    with pytest.raises(Inexact):
        rig.assert_exact([one(rig, user(filler(60), picture(33), "What is in this picture?"))])


@pytest.mark.parametrize("config", [EngineConfig("gemma3")], ids=["gemma3"])
def test_reference_form_is_exact(pool: EnginePool, config: EngineConfig) -> None:
    """The naive form of attention, on the same engine and after the fast form filled the cache."""
    from vllm_mmcache.reference_attention.vllm_layers import computed_naively

    rig = pool.get(config)
    ask = user(filler(60), picture(34), picture(35), "Compare.")
    fast = one(rig, ask)
    with computed_naively(rig.runner):
        warm = one(rig, ask)
        assert warm.num_cached_tokens > 0
        rig.make_cold()
        cold = one(rig, ask)
    rig.assert_exact([fast, warm, cold])
