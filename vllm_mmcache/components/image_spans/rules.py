# SPDX-License-Identifier: Apache-2.0
"""Which tokens attend both ways, by model and by kind of layer. Pure; read at start, by API processes and workers.

A row q sees a key k when

    (k <= q  or  q and k lie in the same image)  and  k > q - window

as in Transformers 5.19; the window is there in sliding layers, the image term where this table says so. A layer's
window does not tell: Gemma 3's full layers have the image term, Gemma 4's do not. A model that is not in the table
is not guessed at: it is refused on the CPU, before the engine starts.
"""

from dataclasses import dataclass
from typing import Any

from vllm_mmcache.base.status import State


@dataclass(frozen=True)
class Images:
    """Whether the tokens of one image see each other, in layers without and with a sliding window."""

    full: bool
    sliding: bool


SERVED: dict[str, Images] = {
    "gemma3": Images(full=True, sliding=True),
    "gemma4": Images(full=False, sliding=True),  # "vision"; with null vLLM marks no image at all
}
"""By model_type, each proven against Transformers by the exactness tests."""

_WHY_NOT = {
    "paligemma": "the whole prompt attends both ways, also its text, and vLLM marks the image alone, on any platform",
}


def are_bidirectional(model_type: str, is_sliding: bool) -> bool:
    """Whether images attend both ways in this kind of layer; False for a model that is not in the table."""
    images = SERVED.get(model_type)
    if images is None:
        return False
    return images.sliding if is_sliding else images.full


def refusal(model_config: Any, on_cpu: bool) -> str | None:
    """Why images of this model would run causally, and the cure, in one sentence; None where they don't.

    model_config is vLLM's. On the CPU attention over images is ours, so a model must be in the table.
    """
    if not model_config.is_mm_prefix_lm:
        return None  # vLLM clears the mark in a text-only deployment
    model_type = getattr(model_config.hf_config, "model_type", "")
    allow = "or set MMCACHE_ALLOW_CAUSAL_IMAGES=1 to run it all the same"
    if on_cpu and model_type not in SERVED:
        unknown = f"mmcache does not know in which layers (it does for {' and '.join(SERVED)}); a GPU's attention may"
        return (
            f"images of a {model_type} model attend both ways, and on the CPU answers would be wrong: "
            f"{_WHY_NOT.get(model_type, unknown)}. Serve another model, {allow}"
        )
    window = getattr(model_config.hf_text_config, "sliding_window", None)
    tokens = getattr(model_config.hf_config, "mm_tokens_per_image", 0) if model_type == "gemma3" else 0
    if window and tokens > window:  # of Gemma 3 alone: Gemma 4's images are clamped to the window instead
        return (
            f"an image has {tokens} tokens (mm_tokens_per_image) and the sliding window {window}; vLLM's runner leaves "
            "images that are longer than the window out of the spans, so answers would be wrong. Serve a model whose "
            f"images fit its window, {allow}"
        )
    return None


def state_in(vllm_config: Any) -> State | None:
    """Spans have nothing to do where images are causal as text is."""
    if vllm_config.model_config.is_mm_prefix_lm:
        return None
    return State("unneeded", "an image of this model sees what came before it, as text does")
