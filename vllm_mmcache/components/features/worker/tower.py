# SPDX-License-Identifier: Apache-2.0
"""The part of a model that images go through: its weights, and what was loaded into them.

No model class is named. What belongs to the tower is said by what does not: every parameter and buffer outside of the
language model, which each multimodal class of vLLM marks. That is more than the tower where a model also hears, and
never less. (`_tower_model_names` won't do: a class that marks vision and audio apart keeps the last.) Worker process.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from vllm_mmcache.content.digests import inputs_digest

_ATTRIBUTE = "_mmcache_tower"


class Tower:
    """What features of one model depend on beside the image.

    Raises: LookupError where the model does not tell its language model from the rest.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.language_model_names = tuple(getattr(model, "_language_model_names", ()))
        if not self.language_model_names:
            raise LookupError(f"{type(model).__name__} does not mark its language model")
        self.num_loads = 0
        """How often weights were loaded since `watch`."""
        self.loaded: dict[str, str] = {}
        """Digest of each weight of the tower that was loaded, by its name in the checkpoint; see `watch`."""
        self.guard: Callable[[], AbstractContextManager[object]] = nullcontext
        """What to be in while weights are loaded; whoever reads them in another thread puts its own here."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers outside of the language model, by name. Shapes and dtypes: the model's."""
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if not self._is_language(name):
                yield name, tensor.data

    def language_modules(self) -> Iterator[torch.nn.Module]:
        """All modules of the language model."""
        for name, module in self._model.named_modules():
            if name and self._is_language(name):
                yield module

    def hidden_weights(self) -> list[str]:
        """Names of the tower's parameters that are empty: vLLM's CPU kernels pack a weight away and leave none."""
        return [name for name, tensor in self.tensors() if not tensor.numel() and name.endswith("weight")]

    def watch(self, notes: bool) -> None:
        """From now on, count the calls of the model's load_weights; and with `notes` keep digests of what they load.

        Where the platform packs weights away, that is the only way to know them; else `tensors` shows them.
        """
        load = self._model.load_weights
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)

        def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
            with self.guard():
                try:
                    return load(self._noted(weights, mapper) if notes else weights, *args, **kwargs)
                finally:
                    self.num_loads += 1

        self._model.load_weights = load_weights
        setattr(self._model, _ATTRIBUTE, self)

    def _noted(self, weights: Iterable[tuple[str, torch.Tensor]], mapper: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if not self._is_language(mapper.map_name(name) or name if mapper is not None else name):
                self.loaded[name] = inputs_digest({name: tensor})
            yield name, tensor

    def _is_language(self, name: str) -> bool:
        return any(name == own or name.startswith(own + ".") for own in self.language_model_names)


def watched(model: Any) -> Tower | None:
    """The Tower of a model on which `watch` was called."""
    found: Tower | None = getattr(model, _ATTRIBUTE, None)
    return found
