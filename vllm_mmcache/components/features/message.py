# SPDX-License-Identifier: Apache-2.0
"""What the engine tells its ranks of one step: features that lie in the arena for them, and room for new ones.

Travels with vLLM's SchedulerOutput, pickled. Ids only grow; a rank writes the last one that it is done with on its row
of the arena's board. A save is good when its seal, the eight bytes behind its features, holds its id.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm_mmcache.components.features.package import Shape

SEAL_BYTES = 8


@dataclass(frozen=True)
class SlotRef:
    """Where one image's features lie in the arena, or shall."""

    number: int
    """Of this load or save; each kind counts for itself."""
    mm_hash: str
    offset: int
    shape: Shape


@dataclass
class Message:
    """Loads and saves of one step, in the order of their numbers."""

    generation: int
    """Of the weights that these features are of. A rank whose weights are others leaves all of it alone."""
    loads: list[SlotRef] = field(default_factory=list)
    saves: list[SlotRef] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    """By mm_hash, how many tokens an image has in its prompt that came without its pixels."""
    pixels: dict[str, Any] = field(default_factory=dict)
    """By mm_hash, vLLM's items of images to be encoded that were sent without their pixels, which are made now."""
