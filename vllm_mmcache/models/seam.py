# SPDX-License-Identifier: Apache-2.0
"""Registers this room's model classes in vLLM's ModelRegistry, by name, so that nothing is imported before use."""

from typing import Any

CLASSES = {"Gemma3ForConditionalGeneration": "vllm_mmcache.models.gemma3:ImageSpanGemma3"}

_before: dict[str, Any] = {}


def install() -> None:
    """Register every class; a second call changes nothing."""
    from vllm.model_executor.models import ModelRegistry

    for architecture, path in CLASSES.items():
        if architecture not in _before:
            _before[architecture] = ModelRegistry.models.get(architecture)
            ModelRegistry.models.pop(architecture, None)  # or vLLM would warn that it is overwritten
            ModelRegistry.register_model(architecture, path)


def undo() -> None:
    """Put vLLM's own classes back."""
    from vllm.model_executor.models import ModelRegistry

    for architecture, model in _before.items():
        if model is None:
            ModelRegistry.models.pop(architecture, None)
        else:
            ModelRegistry.models[architecture] = model
    _before.clear()
