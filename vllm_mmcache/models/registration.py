# SPDX-License-Identifier: Apache-2.0
"""Registers classes of this room in vLLM's ModelRegistry by name, so that nothing is imported before use."""

from collections.abc import Mapping
from typing import Any


class Registration:
    """Architectures and the "module:Class" that serves each; both methods are re-entrant."""

    def __init__(self, classes: Mapping[str, str]) -> None:
        self.classes = classes
        self._before: dict[str, Any] = {}

    def install(self) -> None:
        """Register every class."""
        from vllm.model_executor.models import ModelRegistry

        for architecture, path in self.classes.items():
            if architecture not in self._before:
                self._before[architecture] = ModelRegistry.models.get(architecture)
                ModelRegistry.models.pop(architecture, None)  # or vLLM would warn that it is overwritten
                ModelRegistry.register_model(architecture, path)

    def undo(self) -> None:
        """Put back what was registered before."""
        from vllm.model_executor.models import ModelRegistry

        for architecture, model in self._before.items():
            if model is None:
                ModelRegistry.models.pop(architecture, None)
            else:
                ModelRegistry.models[architecture] = model
        self._before.clear()
