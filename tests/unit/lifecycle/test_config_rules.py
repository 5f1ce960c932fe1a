# SPDX-License-Identifier: Apache-2.0
"""Where vLLM itself answers wrongly, it is said, and where one thing is otherwise, or vLLM is mended, it is not.

That it is wrong there, and nowhere else, is tests/engine/speculative/test_hybrid_prefix.py's.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mmcache.lifecycle.config_rules import wrong_in_vllm


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
