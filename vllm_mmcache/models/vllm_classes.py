# SPDX-License-Identifier: Apache-2.0
"""The model classes that are registered with vLLM, each made when vLLM loads it by name. Any process of vLLM.

A class is its parent in everything that vLLM or a tool reads (name, module, documentation, what it supports), and no
forward is copied. It adds what its images are, and the trap before its vision tower.

A name here is that of the architecture and, after an @, a digest of the parent's source: vLLM keeps on disk what it
has found out about a class, by the class's name and the source of its module, which is this one for all of them.
"""

from typing import Any

from vllm_mmcache.models import tower_trap
from vllm_mmcache.models.facts import FACTS
from vllm_mmcache.models.protocol import ATTRIBUTE
from vllm_mmcache.models.vllm_registry import parent_of

_made: dict[str, type] = {}


def __getattr__(name: str) -> type:
    """The class of this name. Raises: AttributeError."""
    architecture = name.partition("@")[0]
    if architecture not in FACTS or (parent := parent_of(architecture)) is None:
        raise AttributeError(f"module {__name__} has no class {name}")
    if architecture not in _made:
        _made[architecture] = _class_of(parent.load_model_cls(), architecture)
    return _made[architecture]


def _class_of(parent: Any, architecture: str) -> type:
    def embed_multimodal(self: Any, **kwargs: Any) -> Any:
        tower_trap.spring(architecture)
        return parent.embed_multimodal(self, **kwargs)

    embed_multimodal.__doc__ = parent.embed_multimodal.__doc__
    made: type = type(parent)(
        parent.__name__,
        (parent,),
        {
            "__module__": parent.__module__,
            "__doc__": parent.__doc__,
            ATTRIBUTE: FACTS[architecture],
            "embed_multimodal": embed_multimodal,
        },
    )
    return made
