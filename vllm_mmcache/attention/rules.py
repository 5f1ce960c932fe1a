# SPDX-License-Identifier: Apache-2.0
"""Which tokens attend both ways, by model and by kind of layer. Pure data; read at start, in the worker process.

A row q sees a key k when

    (k <= q  or  q and k lie in the same image)  and  k > q - window

as in Transformers 5.19; the window is there in sliding layers, the image term where this table says so. A layer's
window does not tell: Gemma 3's full layers have the image term, Gemma 4's do not. A model that is not in the table
is not guessed at: attention/guard.py refuses it on the CPU.
"""

from dataclasses import dataclass


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


def both_ways(model_type: str, is_sliding: bool) -> bool:
    """Whether images attend both ways in this kind of layer; False for a model that is not in the table."""
    images = SERVED.get(model_type)
    if images is None:
        return False
    return images.sliding if is_sliding else images.full


def why_not(model_type: str) -> str | None:
    """Why a model whose images attend both ways can't be served exactly on the CPU; None where it can."""
    if model_type in SERVED:
        return None
    unknown = f"mmcache does not know in which layers (it does for {' and '.join(SERVED)}); a GPU's attention may"
    return _WHY_NOT.get(model_type, unknown)
