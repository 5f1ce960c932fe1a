# SPDX-License-Identifier: Apache-2.0
"""Whether images of a model would run causally that attend both ways, and where they attend so. Pure, no vLLM.

A row q sees a key k when

    (k <= q  or  q and k lie in the same image)  and  k > q - window

as in Transformers 5.19; the window is there in sliding layers, the image term where the model's class says so
(models/protocol.py). A layer's window does not tell: Gemma 3's full layers have the image term, Gemma 4's do not. What
a class does not say is not guessed at: such a model is refused on the CPU, before the engine starts.
"""

from typing import Any

from vllm_mmcache.base.status import State
from vllm_mmcache.models.protocol import ImageModel

ALLOW = "or set MMCACHE_ALLOW_CAUSAL_IMAGES=1 to run it all the same"


def are_bidirectional(images: ImageModel | None, hf_config: Any, is_sliding: bool) -> bool:
    """Whether images attend both ways in this kind of layer; False for a model whose class does not say."""
    return images is not None and images.attention(hf_config).goes_both_ways(is_sliding)


def refusal(model_config: Any, images: ImageModel | None, on_cpu: bool) -> str | None:
    """Why images of this model would run causally, and the cure, in one sentence; None where they don't.

    model_config is vLLM's, and images is what the model's class says. On the CPU attention over images is ours, so the
    class must say where it goes both ways.
    """
    if not model_config.is_mm_prefix_lm:
        return None  # vLLM clears the mark in a text-only deployment
    hf_config = model_config.hf_config
    attention = images.attention(hf_config) if images is not None else None
    if on_cpu and (attention is None or attention.why_wrong):
        unknown = (
            "its model class does not say in which layers (docs/models.md says how it can); a GPU's attention may know"
        )
        return (
            f"images of a {getattr(hf_config, 'model_type', '')} model attend both ways, and on the CPU answers would "
            f"be wrong: {attention.why_wrong if attention is not None else unknown}. Serve another model, {ALLOW}"
        )
    window = getattr(model_config.hf_text_config, "sliding_window", None)
    num_tokens = images.num_tokens(hf_config) if images is not None else 0
    if window and attention is not None and not attention.is_clamped and num_tokens > window:
        return (
            f"an image has {num_tokens} tokens and the sliding window {window}; vLLM's runner leaves images that are "
            f"longer than the window out of the spans, so answers would be wrong. Serve a model whose images fit its "
            f"window, {ALLOW}"
        )
    return None


def state_in(vllm_config: Any) -> State | None:
    """Spans have nothing to do where images are causal as text is."""
    model_config = vllm_config.model_config
    if not model_config.is_mm_prefix_lm:
        return State("unneeded", "an image of this model sees what came before it, as text does")
    if getattr(model_config.hf_config, "model_type", "") == "deepseek_v4":
        return State("off", "text between an image's rows attends both ways, too, in this model")
    return None
