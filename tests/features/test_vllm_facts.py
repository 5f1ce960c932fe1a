# SPDX-License-Identifier: Apache-2.0
"""Configurations without a feature store: each says why, and a user's own ec_transfer_config wins."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_mmcache import settings
from vllm_mmcache.features.vllm_facts import why_not
from vllm_mmcache.models.tower import CountedTower


def runner(model: Any, takes_images: bool = True) -> Any:
    made = object.__new__(GPUModelRunner)
    made.model, made.supports_mm_inputs = model, takes_images
    return made


def tower(loaded: dict[str, str] | None) -> CountedTower:
    made = CountedTower()
    made.loaded_weights = loaded
    return made


def config(**more: Any) -> Any:
    pruned = more.pop("pruned", False)
    values = {
        "cache_config": SimpleNamespace(enable_prefix_caching=more.pop("caching", True)),
        "ec_transfer_config": None,
        "lora_config": None,
        "load_config": SimpleNamespace(load_format="dummy"),
        "model_config": SimpleNamespace(
            multimodal_config=SimpleNamespace(is_multimodal_pruning_enabled=lambda: pruned)
        ),
    }
    return SimpleNamespace(**values | more)


COUNTED = tower({"visual.weight": "digest"})


@pytest.mark.parametrize(
    ("vllm_config", "model_runner", "reason"),
    [
        (config(), runner(COUNTED), ""),
        (config(), SimpleNamespace(), "not written for this model runner, types"),
        (config(), runner(COUNTED, takes_images=False), "takes no images"),
        (config(caching=False), runner(COUNTED), "prefix caching is off"),
        (config(ec_transfer_config=SimpleNamespace()), runner(COUNTED), "ec_transfer_config is set, and wins"),
        (config(), runner(SimpleNamespace()), "not tested with SimpleNamespace"),
        (config(lora_config=SimpleNamespace(enable_tower_connector_lora=True)), runner(COUNTED), "LoRA adapters"),
        (config(lora_config=SimpleNamespace(enable_tower_connector_lora=False)), runner(COUNTED), ""),
        (config(pruned=True), runner(COUNTED), "features are pruned"),
        (config(), runner(tower(None)), "load format dummy"),
        (config(), runner(tower({})), "load format dummy"),
    ],
)
def test_why_not(vllm_config: Any, model_runner: Any, reason: str) -> None:
    said = why_not(vllm_config, model_runner)
    assert reason in said
    assert bool(said) == bool(reason)


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", settings.load_settings({"features": False}))
    assert why_not(config(), runner(COUNTED)) == "switched off by the setting features"
