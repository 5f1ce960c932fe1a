# SPDX-License-Identifier: Apache-2.0
"""How many tokens an image has for a model, and what its features and pixels weigh: the rules of the processors.

The rules are those of the models' own processors with their published settings; tests compare them with Transformers.
"""

import math
from dataclasses import dataclass, replace

from vllm_mmcache.base.errors import RecordsError

FIXED_SIDE = 896
"""Pixels of each side to which a processor brings all images that have the same number of tokens: Gemma 3's."""
UNKNOWN_SIDE = 1024
"""Pixels of each side of an image whose size is not in the log."""


@dataclass(frozen=True)
class Model:
    """What an estimate asks about a model. Units: pixels, tokens, bytes."""

    name: str
    factor: int = 0
    """One token stands for a square of so many pixels a side; 0 where every image has `fixed` tokens."""
    min_pixels: int = 0
    max_pixels: int = 0
    fixed: int = 0
    fills: bool = False
    """Every image is brought as near to max_pixels as its shape allows, small ones too."""
    keeps_all_kv: bool = True
    """Full attention in every layer: a hit can end anywhere, and not only where a state was kept."""
    window_tokens: int = 0
    """Of sliding windows: a prompt that is no longer is kept whole in them."""
    state_blocks: float = 0
    """Blocks of the KV cache that a recurrent state takes: groups of such layers, for each of full attention."""
    feature_bytes: int = 0
    """Of one token as the vision tower gives it, in 16 bits."""
    mark_tokens: int = 0
    """Around an image in the prompt: where it begins and ends, and line breaks."""
    pixel_bytes: int = 6
    """Of one pixel as vLLM's processor cache holds it, in 16 bits."""

    def size(self, width: int, height: int) -> tuple[int, int]:
        """The size to which the processor brings an image."""
        width, height = width or UNKNOWN_SIDE, height or UNKNOWN_SIDE
        if not self.factor:
            return FIXED_SIDE, FIXED_SIDE
        if self.fills:
            return self._filled(width, height)
        rounded = [round(side / self.factor) * self.factor for side in (width, height)]
        if rounded[0] * rounded[1] > self.max_pixels:
            shrink = math.sqrt(width * height / self.max_pixels)
            rounded = [
                max(self.factor, math.floor(side / shrink / self.factor) * self.factor) for side in (width, height)
            ]
        elif rounded[0] * rounded[1] < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            rounded = [math.ceil(side * grow / self.factor) * self.factor for side in (width, height)]
        return rounded[0], rounded[1]

    def _filled(self, width: int, height: int) -> tuple[int, int]:
        scale = math.sqrt(self.max_pixels / (width * height))
        longest = self.max_pixels // self.factor
        wide, high = (math.floor(scale * side / self.factor) * self.factor for side in (width, height))
        if not wide:
            return self.factor, min(height // width * self.factor, longest)
        if not high:
            return min(width // height * self.factor, longest), self.factor
        return wide, high

    def tokens(self, width: int, height: int) -> int:
        """Of an image in the prompt, without those around it."""
        if not self.factor:
            return self.fixed
        wide, high = self.size(width, height)
        return wide * high // self.factor**2


_QWEN_NEW = Model("", 32, 65_536, 16_777_216, mark_tokens=2, pixel_bytes=12)  # two frames, as of a video
_QWEN_OLD = Model("", 28, 3_136, 12_845_056, mark_tokens=2, pixel_bytes=12)
MODELS = {
    model.name: model
    for model in (
        replace(_QWEN_NEW, name="qwen3-vl-8b", feature_bytes=4 * 4096 * 2),  # with three levels of DeepStack
        replace(_QWEN_NEW, name="qwen3.5-4b", feature_bytes=2560 * 2, keeps_all_kv=False, state_blocks=3),
        replace(_QWEN_OLD, name="qwen2.5-vl-7b", feature_bytes=3584 * 2),
        replace(_QWEN_OLD, name="qwen2-vl-7b", feature_bytes=3584 * 2),
        Model("gemma3-12b", fixed=256, mark_tokens=4, feature_bytes=3840 * 2, keeps_all_kv=False, window_tokens=1024),
        Model(
            "gemma4-31b",
            48,
            max_pixels=280 * 48**2,
            fills=True,
            mark_tokens=2,
            feature_bytes=5376 * 2,
            keeps_all_kv=False,
            window_tokens=1024,
        ),
    )
}


def named(name: str) -> Model:
    """The model of this name. Raises: RecordsError, which names those that there are."""
    if name not in MODELS:
        raise RecordsError(f"--model {name!r} is not known: choose one of {', '.join(MODELS)}")
    return MODELS[name]
