# SPDX-License-Identifier: Apache-2.0
"""What a model class can say of its images, for caches that must not guess it. Pure, no vLLM.

A class takes part by an attribute, `mmcache_images`, that is an ImageModel. So does any model class that a third party
registers with vLLM. Where a class has none, mmcache looks at what the loaded model does (features), or refuses what it
can't know (attention both ways on the CPU).
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

ATTRIBUTE = "mmcache_images"
"""Of a model class: its ImageModel."""


@dataclass(frozen=True)
class ImageTokens:
    """The tokens of an image in a prompt: `begin`, then one `image` for each embedding, then `end`."""

    image: int
    begin: int | None = None
    """None where nothing marks where an image begins."""
    end: int | None = None


@dataclass(frozen=True)
class ImageAttention:
    """Whether the tokens of one image see each other both ways, in layers without and with a sliding window.

    A row q sees a key k when (k <= q, or both lie in the same image and the layer says so) and k > q - window.
    """

    full: bool = False
    sliding: bool = False
    is_clamped: bool = True
    """Whether an image of more tokens than the window is computed so, too; False where vLLM's runners leave it out."""
    why_wrong: str = ""
    """Why no backend of vLLM computes it as the model was trained, if so."""

    def goes_both_ways(self, is_sliding: bool) -> bool:
        """Whether the tokens of one image see each other in this kind of layer."""
        return self.sliding if is_sliding else self.full


@dataclass(frozen=True)
class VisualPackage:
    """What the vision tower makes of one image: a tensor (num_tokens, width) of the model's dtype."""

    hidden_size: int
    """Of the language model."""
    num_levels: int = 0
    """DeepStack levels, each of hidden_size more columns."""
    grid: str = ""
    """The processor's field with the image's patches in time, height and width; empty of images of one size."""

    @property
    def width(self) -> int:
        """Columns."""
        return self.hidden_size * (1 + self.num_levels)


@runtime_checkable
class ImageModel(Protocol):
    """What a model class says of its images. hf_config is that of the checkpoint, as Transformers reads it."""

    def tokens(self, hf_config: Any) -> ImageTokens:
        """By which tokens an image begins, goes on and ends."""
        ...

    def attention(self, hf_config: Any) -> ImageAttention:
        """Which tokens attend both ways, in which layers."""
        ...

    def num_tokens(self, hf_config: Any) -> int:
        """How many tokens each image has, where all have the same number; 0 where that depends on the image."""
        ...

    def package(self, hf_config: Any) -> VisualPackage:
        """What the vision tower makes of an image."""
        ...
