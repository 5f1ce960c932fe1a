# SPDX-License-Identifier: Apache-2.0
"""Refuses attention that would run a model's images causally, silently wrong. Worker process, at start."""

from typing import Any

from vllm_mmcache.base import settings, status
from vllm_mmcache.base.errors import CausalImages
from vllm_mmcache.components.image_spans import rules
from vllm_mmcache.hooking.hook import Hooks
from vllm_mmcache.models.vllm_registry import images_of

hook = Hooks(
    "image_spans",
    "worker",
)


@hook(
    "vllm.model_executor.layers.attention.attention:Attention.__init__",
    name="guard",
    why="a backend that runs images causally is silently wrong",
    upstream="none: the CPU platform ignores use_mm_prefix",
    remove_when="every platform refuses such a backend",
)
def require_bidirectional_images(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of vLLM's Attention.__init__, for every model that vLLM marks as prefix-LM for images.

    Raises: CausalImages naming the backend and the cure, unless the setting allow_causal_images insists.
    """
    outcome = wrapped(*args, **kwargs)
    check(instance)
    return outcome


def is_wanted() -> bool:
    """Whether models whose images would run causally are to be refused."""
    return status.is_on("image_spans") and not settings.current().allow_causal_images


def check(layer: Any) -> None:
    """Check one decoder attention layer. Raises: CausalImages."""
    if not getattr(layer, "use_mm_prefix", False) or not is_wanted():
        return
    backend = layer.attn_backend
    if layer.attn_type == "decoder" and not backend.supports_mm_prefix():
        raise CausalImages(
            f"attention backend {backend.get_name()} would let the tokens of an image see earlier tokens only, but "
            f"this model's images attend both ways, so answers would be wrong. Choose a backend that can "
            "(--attention-backend TRITON_ATTN on a GPU; on a CPU leave the component image_spans on), "
            "or set MMCACHE_ALLOW_CAUSAL_IMAGES=1 to run it all the same"
        )


def check_model(model_config: Any) -> None:
    """Check the model that the CPU backend is to serve.

    While layers are made, vLLM's configuration is that of the language model alone, which does not say what an image
    is; so this is asked when the backend is set up. A server asks before it starts its engine. Raises: CausalImages.
    """
    if not is_wanted() or not model_config.is_mm_prefix_lm:
        return
    if reason := rules.refusal(model_config, images_of(model_config), on_cpu=True):
        raise CausalImages(reason)
