# SPDX-License-Identifier: Apache-2.0
"""Every public extension point of vLLM that mmcache uses at start. Data only; a seam belongs to a group of the ledger.

A group's seams are installed after its swaps in the same process, and undone before them.
"""

import importlib
from dataclasses import dataclass

from vllm_mmcache.rooms import Role


@dataclass(frozen=True)
class Seam:
    """One public extension point: room is a module with install() and undo(), both re-entrant."""

    name: str
    group: str
    process: Role
    point: str
    room: str
    why: str

    def install(self) -> None:
        """Use the extension point. Raises: SwapError if another plugin already does."""
        importlib.import_module(self.room).install()

    def undo(self) -> None:
        """Give it back."""
        importlib.import_module(self.room).undo()


SEAMS: tuple[Seam, ...] = (
    Seam(
        name="image_spans.backend",
        group="image_spans",
        process="worker",
        point="vllm.v1.attention.backends.registry:register_backend",
        room="vllm_mmcache.image_spans.attention.registration",
        why="vLLM's CPU backend runs images causally that attend both ways",
    ),
)
