# SPDX-License-Identifier: Apache-2.0
"""How large an image is to the vision tower of each family, so that the tower is most of a question's time.

Qwen's towers see as many patches as the picture has: 4,096 of a picture of 1024x1024 pixels. Others scale every picture
to one size. Gemma 4's is a setting of servers (70, 140, 280, 560 or 1,120 tokens); the zoo's 70 are 630 patches, too
few to show, and so are the 256 patches of the zoo's Gemma 3.
"""

from dataclasses import dataclass
from typing import Any

from vllm_mmcache.zoo import FAMILIES, ZooOptions

MEASURED = tuple(one for one in ("qwen3-vl", "qwen3.5", "qwen3-vl-moe", "gemma4") if one in FAMILIES)


@dataclass(frozen=True)
class Shape:
    """Options of the zoo's model, and arguments of vLLM's LLM()."""

    zoo: ZooOptions | None = None
    engine: tuple[tuple[str, Any], ...] = ()


SHAPES = {
    # At most 560 tokens, 5,040 patches: 20 pictures are more than vLLM's own encoder cache, which has room for the
    # tokens of a step, so stock runs the tower each time. The window holds an image, as in the published larger models.
    "gemma4": Shape(ZooOptions(sliding_window=1024), (("mm_processor_kwargs", {"max_soft_tokens": 560}),)),
}


def shape_of(family: str) -> Shape:
    """The family's shape; the zoo's and vLLM's defaults where none is written down."""
    return SHAPES.get(family, Shape())
