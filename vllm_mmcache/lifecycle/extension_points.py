# SPDX-License-Identifier: Apache-2.0
"""Every public extension point of vLLM that mmcache uses at start. Data only; each belongs to a group of the ledger.

Those of a group are installed after its hooks in the same process, and undone before them.
"""

import importlib
from dataclasses import dataclass

from vllm_mmcache.base.status import Role


@dataclass(frozen=True)
class ExtensionPoint:
    """One public extension point: room is a module with install() and undo(), both re-entrant."""

    name: str
    group: str
    process: Role
    point: str
    room: str
    why: str

    def install(self) -> None:
        """Use the extension point. Raises: HookError if another plugin already does."""
        importlib.import_module(self.room).install()

    def undo(self) -> None:
        """Give it back."""
        importlib.import_module(self.room).undo()


EXTENSION_POINTS: tuple[ExtensionPoint, ...] = (
    ExtensionPoint(
        name="image_spans.backend",
        group="image_spans",
        process="worker",
        point="vllm.v1.attention.backends.registry:register_backend",
        room="vllm_mmcache.components.image_spans.vllm_registry",
        why="vLLM's CPU backend runs images causally that attend both ways",
    ),
)
