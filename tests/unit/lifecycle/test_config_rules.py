# SPDX-License-Identifier: Apache-2.0
"""Which engines can't try their components, and where it is said that vLLM itself answers wrongly.

That it does so there, and nowhere else, is tests/engine/speculative/test_hybrid_prefix.py's.
"""

from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mmcache.lifecycle.config_rules import why_no_trial, wrong_in_vllm


def config(**other: Any) -> Any:
    chosen = {"is_hybrid": True, "is_cached": True, "drafts": True, "is_async": True, "is_v2": False} | other
    return SimpleNamespace(
        model_config=SimpleNamespace(is_hybrid=chosen["is_hybrid"]),
        cache_config=SimpleNamespace(enable_prefix_caching=chosen["is_cached"]),
        speculative_config=SimpleNamespace(method="mtp") if chosen["drafts"] else None,
        scheduler_config=SimpleNamespace(async_scheduling=chosen["is_async"]),
        use_v2_model_runner=chosen["is_v2"],
    )


def test_it_is_said() -> None:
    assert wrong_in_vllm(config()).endswith("(vLLM 51571): wrong answers")


@pytest.mark.parametrize("other", ["is_hybrid", "is_cached", "drafts", "is_async", "is_v2"])
def test_one_thing_is_otherwise(other: str) -> None:
    assert wrong_in_vllm(config(**{other: other == "is_v2"})) == ""


def test_a_mended_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    monkeypatch.setattr(GPUModelRunner, "_prepare_inputs", lambda self: self.prev_num_accepted_tokens)
    assert wrong_in_vllm(config()) == ""


@pytest.mark.parametrize(
    ("part", "value", "why"),
    [
        ("model_config.logprobs_mode", "raw_logits", "its log-probabilities are raw_logits"),
        ("model_config.logprobs_mode", "processed_logprobs", "its log-probabilities are processed_logprobs"),
        ("model_config.runner_type", "pooling", "does not generate text"),
        ("cache_config.enable_prefix_caching", False, "prefix caching is off"),
        ("ec_transfer_config", object(), "a connector"),
        ("parallel_config.data_parallel_size", 2, "mixture of experts"),
    ],
)
def test_an_engine_that_can_not_try_its_components(part: str, value: Any, why: str) -> None:
    images = SimpleNamespace(get_limit_per_prompt=lambda modality: 1)
    engine = SimpleNamespace(
        model_config=SimpleNamespace(
            multimodal_config=images, runner_type="generate", logprobs_mode="raw_logprobs", is_moe=True
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        parallel_config=SimpleNamespace(data_parallel_size=1, distributed_executor_backend="mp"),
        kv_transfer_config=None,
        ec_transfer_config=None,
    )
    assert why_no_trial(engine) == ""
    owner, _, name = f"engine.{part}".rpartition(".")
    setattr(attrgetter(owner)(SimpleNamespace(engine=engine)), name, value)
    assert why in why_no_trial(engine)
