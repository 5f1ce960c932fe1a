# SPDX-License-Identifier: Apache-2.0
"""Configurations without a feature store: each says why, and a user's own ec_transfer_config wins."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_mmcache import settings
from vllm_mmcache.features.vllm_facts import why_not


def runner(takes_images: bool = True) -> Any:
    made = object.__new__(GPUModelRunner)
    made.supports_mm_inputs = takes_images
    return made


def config(**more: Any) -> Any:
    pruned = more.pop("pruned", False)
    values = {
        "cache_config": SimpleNamespace(enable_prefix_caching=more.pop("caching", True)),
        "ec_transfer_config": None,
        "lora_config": None,
        "load_config": SimpleNamespace(load_format="dummy"),
        "model_config": SimpleNamespace(
            multimodal_config=SimpleNamespace(
                is_multimodal_pruning_enabled=lambda: pruned,
                mm_encoder_attn_dtype=more.pop("attention", None),
                mm_encoder_fp8_scale_path=more.pop("scales", None),
            )
        ),
    }
    return SimpleNamespace(**values | more)


@pytest.mark.parametrize(
    ("vllm_config", "model_runner", "reason"),
    [
        (config(), runner(), ""),
        (config(), SimpleNamespace(), "not written for this model runner, types"),
        (config(), runner(takes_images=False), "takes no images"),
        (config(caching=False), runner(), "prefix caching is off"),
        (config(ec_transfer_config=SimpleNamespace()), runner(), "ec_transfer_config is set, and wins"),
        (config(lora_config=SimpleNamespace(enable_tower_connector_lora=True)), runner(), "LoRA adapters"),
        (config(lora_config=SimpleNamespace(enable_tower_connector_lora=False)), runner(), ""),
        (config(pruned=True), runner(), "features are pruned"),
        (config(attention="fp8"), runner(), "fp8 scales follow"),
        (config(attention="fp8", scales="/scales.json"), runner(), ""),
    ],
)
def test_why_not(vllm_config: Any, model_runner: Any, reason: str) -> None:
    said = why_not(vllm_config, model_runner)
    assert reason in said
    assert bool(said) == bool(reason)


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_current", settings.load_settings({"features": False}))
    assert why_not(config(), runner()) == "switched off by the setting features"
