# SPDX-License-Identifier: Apache-2.0
"""Models for which a rank opens no store."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.models.ernie45_vl import Ernie4_5_VLMoeForConditionalGeneration
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration

from vllm_mmcache.components.features.worker import opening
from vllm_mmcache.components.features.worker.vllm_probe import Unsupported


@pytest.mark.parametrize(
    ("model_class", "has_adapters", "is_refused"),
    [
        (Ernie4_5_VLMoeForConditionalGeneration, True, True),
        (Ernie4_5_VLMoeForConditionalGeneration, False, False),
        (Qwen3VLForConditionalGeneration, True, False),
    ],
)
def test_adapters_that_could_reach_the_tower(
    model_class: Any, has_adapters: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM wraps all layers of a model that does not tell which ones are its tower's."""
    monkeypatch.setattr(opening, "why_not", lambda runner: "")
    monkeypatch.setattr(opening, "watched", lambda model: "its tower")
    model: Any = model_class.__new__(model_class)
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        vllm_config=SimpleNamespace(lora_config=object() if has_adapters else None),
    )
    if is_refused:
        with pytest.raises(Unsupported, match="adapters can change the vision tower: Ernie4_5_VLMoe"):
            opening._tower_of(worker)
    else:
        assert opening._tower_of(worker) == "its tower"
