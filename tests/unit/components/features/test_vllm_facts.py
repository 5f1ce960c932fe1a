# SPDX-License-Identifier: Apache-2.0
"""Configurations and model runners without a feature store: each says why."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tests.support.store_server import Put
from vllm_mmcache.base import status
from vllm_mmcache.components import features
from vllm_mmcache.components.features.vllm_facts import why_not
from vllm_mmcache.components.features.worker import opening
from vllm_mmcache.components.features.worker.vllm_probe import Unsupported
from vllm_mmcache.lifecycle import config_rules


def config(**more: Any) -> Any:
    pruned, limit = more.pop("pruned", False), more.pop("limit", 999)
    values = {
        "cache_config": SimpleNamespace(enable_prefix_caching=more.pop("caching", True)),
        "ec_transfer_config": None,
        "lora_config": None,
        "scheduler_config": SimpleNamespace(get_scheduler_cls=lambda: Scheduler),
        "parallel_config": SimpleNamespace(
            prefill_context_parallel_size=more.pop("split", 1),
            distributed_executor_backend=more.pop("executor", "mp"),
            world_size=more.pop("ranks", 2),
            enable_elastic_ep=more.pop("elastic", False),
        ),
        "model_config": SimpleNamespace(
            multimodal_config=SimpleNamespace(
                get_limit_per_prompt=lambda modality: limit,
                is_multimodal_pruning_enabled=lambda: pruned,
                mm_encoder_attn_dtype=more.pop("attention", None),
                mm_encoder_fp8_scale_path=more.pop("scales", None),
                mm_processor_cache_type=more.pop("processor_cache", "lru"),
            )
        ),
    }
    return SimpleNamespace(**values | more)


@pytest.mark.parametrize(
    ("vllm_config", "said"),
    [
        (config(), "None"),
        (config(limit=0), "unneeded: this deployment takes no images"),
        (config(caching=False), "off: prefix caching is off"),
        (config(ec_transfer_config=SimpleNamespace()), "off: ec_transfer_config is set, and wins"),
        (config(split=2), "off: not written for context parallelism in prefill"),
        (config(executor="external_launcher"), "off: each rank of an external launcher has an engine of its own"),
        (config(executor="external_launcher", ranks=1), "None"),
        (config(elastic=True), "off: not written for elastic expert parallelism"),
        (config(processor_cache="shm"), "None"),
        (config(lora_config=SimpleNamespace(enable_tower_connector_lora=True)), "off: LoRA adapters"),
        (config(lora_config=SimpleNamespace(enable_tower_connector_lora=False)), "None"),
        (config(pruned=True), "off: features are pruned"),
        (config(attention="fp8"), "off: the tower's fp8 scales follow"),
        (config(attention="fp8", scales="/scales.json"), "None"),
    ],
)
def test_configurations(vllm_config: Any, said: str) -> None:
    assert str(config_rules.state_in(features.COMPONENT, vllm_config)).startswith(said)


def test_the_engine_must_see_what_an_image_shows(put: Put) -> None:
    """By the name that identity gives it, or by its pixels, which go by shared memory here."""
    put(identity=False)
    assert str(config_rules.state_in(features.COMPONENT, config(processor_cache="shm"))).startswith(
        "off: with mm_processor_cache_type=shm"
    )
    assert config_rules.state_in(features.COMPONENT, config()) is None


def test_model_runners() -> None:
    model_runner = object.__new__(GPUModelRunner)
    for takes_images, reason in ((True, ""), (False, "this deployment takes no images")):
        model_runner.supports_mm_inputs = takes_images
        assert why_not(model_runner) == reason
    assert why_not(SimpleNamespace()).startswith("not written for this model runner, types")


@pytest.mark.usefixtures("no_role")
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Unsupported("it has no tower"), "it has no tower"),
        (OSError("no space left"), "the store could not be opened: no space left"),
    ],
)
def test_a_store_that_can_t_be_opened_is_off(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is served without it, and the report says why."""

    def fail(worker: Any, address: str, modalities: list[str]) -> None:
        raise error

    monkeypatch.setattr(opening, "_open", fail)
    status.begin("worker")
    status.put("worker", "features", status.ON)
    assert opening.open_on_rank(SimpleNamespace(model_runner=SimpleNamespace()), "an address", []) == {}
    assert status.of("worker")["features"] == status.State("off", said)
    assert not status.is_on("features")
