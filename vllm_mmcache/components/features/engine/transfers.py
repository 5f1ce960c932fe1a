# SPDX-License-Identifier: Apache-2.0
"""What the engine has of the store beside its tiers: whose weights it is of, and what the ranks still copy.

Ranks write on the arena's board what they are done with. A thread looks at it while something is under way, so that
steps don't; a slot that is being copied stays where it is until every rank has it. Engine process; knows no vLLM.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vllm_mmcache.base import background
from vllm_mmcache.components.features.arena import BOARD, Arena
from vllm_mmcache.components.features.engine.ram_tier import Slot
from vllm_mmcache.components.features.engine.store import Store
from vllm_mmcache.components.features.identity import Identity
from vllm_mmcache.components.features.message import SEAL_BYTES, SlotRef
from vllm_mmcache.components.features.package import Shape
from vllm_mmcache.content.digests import inputs_digest

logger = logging.getLogger("vllm.mmcache")

LOOK_S = 0.002  # between two looks at the board while copies are under way


class Ranks:
    """The ranks of one engine that encode, as their rows of the board show them. Any thread.

    facts: what `open_on_rank` gave in each rank, in the order of their rows.
    """

    def __init__(self, arena: Arena, facts: Sequence[Mapping[str, Any]]) -> None:
        self._board = arena.board
        self._facts = facts[0]
        self._known: tuple[int, str] = (0, "")
        self.width = int(self._facts["width"])
        self.dtype = str(self._facts["dtype"])

    def generation(self) -> int:
        """Of the weights that all ranks have, and say the fingerprint of, counted from 1.

        0 where some rank does not know its own.
        """
        first = int(self._board["generation"][0])
        if not first or (self._board["generation"] != first).any():
            return 0
        if self._known[0] != first:
            prints = b"".join(self._board["fingerprint"].tolist()).decode()
            if (self._board["generation"] != first).any():
                return 0
            self._known = first, inputs_digest({"facts": self._facts["model"], "weights": prints})
        return first

    def keeps(self, modality: str) -> bool:
        """Whether features of this modality are kept."""
        return modality == "image" or (modality == "video" and bool(self._facts.get("video")))

    def identity(self, identifier: str, modality: str = "image") -> Identity | None:
        """What features of an image or a video depend on; None while the weights are not known."""
        if not self.generation():
            return None
        of_videos = f" {self._facts['video']}" if modality == "video" else ""
        return Identity(
            identifier=identifier,
            model=self._known[1],
            processor=self._facts["processor"] + of_videos,
            dtype=self.dtype,
            layout=self._facts["layout"],
        )

    def shape(self, num_tokens: int) -> Shape:
        """What features of an image with so many tokens look like: (num_tokens, width) in the model's dtype."""
        return Shape(num_tokens, self.width, self.dtype)

    def loaded(self) -> int:
        """Number of the last load that every rank is done with; 0 before the first."""
        return int(self._board["loads_done"].min())

    def close(self) -> None:
        """Look at the board no more: from now on no rank knows its weights."""
        self._board = np.zeros(len(self._board), BOARD)

    def saved(self) -> int:
        """Number of the last save that the first rank is done with, which is the one that saves; 0 before the first."""
        return int(self._board["saves_done"][0])


class TransferTracker:
    """Slots that ranks copy from or to. `load` and `save` from the scheduler's thread alone."""

    def __init__(self, store: Store, arena: Arena, ranks: Ranks) -> None:
        self._store = store
        self._arena = arena
        self._ranks = ranks
        self._changed = threading.Condition()
        self._loads: dict[int, Slot] = {}
        self._saves: dict[int, tuple[Slot, Identity, Shape]] = {}
        self._num_loads = 0
        self._num_saves = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def load(self, mm_hash: str, slot: Slot, shape: Shape) -> SlotRef:
        """Where the ranks find what they are to copy. `slot`, which the caller holds, is held until all are done.

        Never waits. Numbers of loads grow from 1. Raises: RuntimeError, and holds nothing, where the machine has no
        thread that could follow the copy.
        """
        self._num_loads += 1
        self._begin(self._loads, self._num_loads, slot)
        return SlotRef(self._num_loads, mm_hash, slot.offset, shape)

    def save(self, mm_hash: str, slot: Slot, identity: Identity, shape: Shape) -> SlotRef:
        """Where the first rank is to put features. `slot` is kept once its seal is there, or else discarded.

        Never waits. Numbers of saves grow from 1. Raises: as `load`.
        """
        self._num_saves += 1
        seal = self._arena.buffer(slot.offset + shape.num_bytes, SEAL_BYTES)
        seal[:] = bytes(SEAL_BYTES)
        self._begin(self._saves, self._num_saves, (slot, identity, shape))
        return SlotRef(self._num_saves, mm_hash, slot.offset, shape)

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is under way. Returns False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._loads or self._saves), timeout_s)

    def close(self) -> None:
        """Look at the board no more, within 1 s; what is under way is let be."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(1)

    def _begin(self, under_way: dict[int, Any], number: int, what: Any) -> None:
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="mmcache-board", daemon=True)
                thread.start()
                self._thread = thread
            under_way[number] = what
            self._changed.notify_all()

    def _run(self) -> None:
        background.lower_priority()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._loads or self._saves or self._closed)
                if self._closed:
                    return
            try:
                self._look()
            except Exception:
                logger.exception("mmcache: the ranks' copies can't be followed; serving goes on without them")
                return
            with self._changed:
                if self._loads or self._saves:
                    self._changed.wait_for(lambda: self._closed, LOOK_S)

    def _look(self) -> None:
        loaded, saved = self._ranks.loaded(), self._ranks.saved()
        for number in [number for number in list(self._loads) if number <= loaded]:
            self._store.release(self._loads[number])  # whoever waits for the end finds it done
            self._end(self._loads, number)
        for number in [number for number in list(self._saves) if number <= saved]:
            slot, identity, shape = self._saves[number]
            seal = self._arena.buffer(slot.offset + shape.num_bytes, SEAL_BYTES)
            if int.from_bytes(seal, "little") == number:
                self._store.keep(slot, identity, shape)
            else:
                self._store.discard(slot, identity)
            self._end(self._saves, number)

    def _end(self, under_way: dict[int, Any], number: int) -> None:
        with self._changed:
            del under_way[number]
            self._changed.notify_all()
