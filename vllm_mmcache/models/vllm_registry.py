# SPDX-License-Identifier: Apache-2.0
"""Puts the model classes of this package into vLLM's registry, and finds what a model's class says. Any process.

Only names are registered, as other general plugins do it, so no model is imported. A class that another plugin has put
there is left alone.
"""

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

from vllm_mmcache.models.facts import FACTS
from vllm_mmcache.models.protocol import ATTRIBUTE, ImageModel

CLASSES = "vllm_mmcache.models.vllm_classes"

_parents: dict[str, Any] = {}  # by architecture: what was registered before


def register_classes() -> list[str]:
    """Register the classes, each in its parent's place; returns the architectures. A second call changes nothing."""
    from vllm.model_executor.models import ModelRegistry

    for architecture in FACTS:
        parent = ModelRegistry.models.get(architecture)
        module = getattr(parent, "module_name", "")
        if not module.startswith("vllm."):  # none, ours, or of another plugin
            continue
        _parents[architecture] = parent
        ModelRegistry.register_model(architecture, f"{CLASSES}:{architecture}@{_digest(module)}")
    return list(_parents)


def unregister_classes() -> None:
    """Give vLLM's own classes their places back; a class that came after ours stays."""
    from vllm.model_executor.models import ModelRegistry

    for architecture, parent in _parents.items():
        if getattr(ModelRegistry.models.get(architecture), "module_name", "") == CLASSES:
            ModelRegistry.models[architecture] = parent
    _parents.clear()


def parent_of(architecture: str) -> Any:
    """What vLLM had registered for an architecture; None where the class of this package is not registered."""
    return _parents.get(architecture)


def images_of(model_config: Any) -> ImageModel | None:
    """What the class of a model says of its images; None where it says nothing. Loads the class, not the model."""
    from vllm.model_executor.model_loader.utils import get_model_cls

    return said_by(get_model_cls(model_config))


def said_by(model_class: type) -> ImageModel | None:
    """What a model class says of its images; None where it says nothing.

    A class of somebody else's that derives from one of vLLM's is spoken for by that one, unless it speaks for itself.
    """
    if isinstance(found := getattr(model_class, ATTRIBUTE, None), ImageModel):
        return found
    own = (base.__name__ for base in model_class.__mro__ if base.__module__.startswith("vllm."))
    return next((FACTS[name] for name in own if name in FACTS), None)


def _digest(module: str) -> str:
    """Of a module's source, without importing it."""
    spec = importlib.util.find_spec(module)
    source = Path(spec.origin).read_bytes() if spec is not None and spec.origin else b""
    return hashlib.sha256(source).hexdigest()[:12]
