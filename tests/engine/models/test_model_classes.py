# SPDX-License-Identifier: Apache-2.0
"""Engines run the registered classes: their features are as wide as they say, and no tower runs where it may not."""

from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool

from tests.support.towers import Runs, ask_about, forget_outputs
from vllm_mmcache.models import tower_trap
from vllm_mmcache.models.facts import FACTS, QwenVL
from vllm_mmcache.models.protocol import ATTRIBUTE, VisualPackage
from vllm_mmcache.models.tower_trap import TowerRan, no_tower

pytestmark = pytest.mark.engine

FAMILIES = [
    "qwen2-vl",
    "qwen2.5-vl",
    pytest.param("qwen3-vl", marks=[pytest.mark.any_engine]),
    "qwen3.5",
    "gemma3",
    "gemma4",
]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tower_runs_for_what_is_known(pool: EnginePool, family: str) -> None:
    """And it does run for what is not."""
    rig = pool.get(EngineConfig(family))
    model_class = type(rig.runner.get_model())
    assert getattr(model_class, ATTRIBUTE) is FACTS[model_class.__name__]
    before, runs = tower_trap.num_runs(), Runs()
    cold = ask_about(rig, 91)
    assert runs.new() == tower_trap.num_runs() - before == 1
    forget_outputs(rig)
    with no_tower():
        warm = ask_about(rig, 91)
    assert [answer.text for answer in warm] == [answer.text for answer in cold]
    rig.assert_exact(warm)


@pytest.mark.parametrize("family", ["qwen3-vl"])
def test_the_trap_is_sprung(pool: EnginePool, family: str) -> None:
    """Negative control: an image that nobody knows."""
    rig = pool.get(EngineConfig(family))
    try:
        with no_tower(), pytest.raises(TowerRan, match="was to run"):
            ask_about(rig, 92)
    finally:
        pool.close()  # a step of it ended in the middle


@pytest.mark.parametrize("family", ["qwen3-vl"])
def test_features_that_are_not_what_the_class_says_are_not_kept(
    pool: EnginePool, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(self: Any, hf_config: Any) -> VisualPackage:
        return VisualPackage(hf_config.get_text_config().hidden_size)

    monkeypatch.setattr(QwenVL, "package", wrong)
    pool.close()
    try:
        rig = pool.get(EngineConfig(family))
        assert rig.features is None
    finally:
        pool.close()
