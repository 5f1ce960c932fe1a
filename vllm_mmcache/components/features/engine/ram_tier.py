# SPDX-License-Identifier: Apache-2.0
"""The first tier: features in the engine's arena, those used longest ago let go first.

Only places are kept here; the bytes are the arena's. A slot is held by whoever reads or fills it, and nothing moves or
overwrites what is held. Engine process, any thread.
"""

import threading
from bisect import bisect, bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field

from vllm_mmcache.base.lru import Size
from vllm_mmcache.components.features.message import SEAL_BYTES
from vllm_mmcache.components.features.tiers import FEATURES
from vllm_mmcache.storage.tier_counts import TierCounts

ALIGN_BYTES = 4096

Gaps = list[tuple[int, int]]
"""[start, end) of what is free, sorted; no two touch."""


@dataclass(eq=False)
class Slot:
    """Place of one image's features: [offset, offset + num_bytes) of the data area. The tier alone writes into it."""

    key: str
    offset: int
    num_bytes: int
    num_holders: int = 1
    is_published: bool = False
    is_used: bool = False
    """Whether anybody has asked for it since it was filled."""
    pending_tiers: set[str] = field(default_factory=set)
    """Names of the tiers that shall have it and do not yet. Any thread."""
    touched_s: float = 0.0
    """By time.monotonic(): when the tiers below were last told that it is used."""

    @property
    def end(self) -> int:
        """Offset of what can follow it."""
        return self.offset + -(-self.num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class RamTier:
    """Slots in `num_bytes` of memory, each in one piece, aligned to ALIGN_BYTES.

    keeps=False: features only pass through the memory, between a rank and the tiers below. A slot goes when it was
    used, nobody holds it and each tier that shall have it does (`Slot.pending_tiers` is empty).
    """

    name = "ram"

    def __init__(self, num_bytes: int, keeps: bool = True) -> None:
        self.counts = TierCounts(FEATURES, self.name)
        self._size = num_bytes // ALIGN_BYTES * ALIGN_BYTES
        self.keeps = keeps
        self._gaps: Gaps = [(0, self._size)] if self._size else []
        self._used_bytes = 0
        # Published, or being filled; the most recently used comes last. What is not in here goes when it is released.
        self._slots: OrderedDict[str, Slot] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: str) -> Slot | None:
        """What is published under `key`, which is then the most recently used; held for the caller, who releases it."""
        with self._lock:
            slot = self._published(key)
            if slot is None:
                self.counts.add(misses=1)
                return None
            self._slots.move_to_end(key)
            slot.num_holders += 1
            slot.is_used = True
            self.counts.add(hits=1, read_bytes=slot.num_bytes)
            return slot

    def size(self) -> Size:
        """What there is, and what there may be."""
        return Size(len(self._slots), self._used_bytes, self._size)

    @staticmethod
    def slot_bytes(num_bytes: int) -> int:
        """What features of so many bytes take of the memory, with the seal behind them."""
        return Slot("", 0, num_bytes + SEAL_BYTES).end

    def has(self, key: str) -> bool:
        """Whether `find` would find it now; counts nothing."""
        with self._lock:
            return self._published(key) is not None

    def hold_if_there(self, key: str) -> Slot | None:
        """As `find`, for a writer: no use of it, and no count."""
        with self._lock:
            if (slot := self._published(key)) is not None:
                slot.num_holders += 1
            return slot

    def reserve(self, key: str, num_bytes: int) -> Slot | None:
        """Room for `num_bytes` that the caller holds, fills, and publishes or discards; older slots go for it.

        None where the key is published or being filled, or where there is no room beside what is held (dropped).
        Raises: ValueError for less than one byte.
        """
        if num_bytes < 1:
            raise ValueError(f"a slot of {num_bytes} bytes")
        slot = Slot(key, 0, num_bytes)
        with self._lock:
            if key in self._slots:
                return None
            start = self._room(slot.end)
            if start is None:
                self.counts.add(dropped=1)
                return None
            at = bisect_left(self._gaps, (start,))
            _, end = self._gaps.pop(at)
            slot.offset = start
            if slot.end < end:
                self._gaps.insert(at, (slot.end, end))
            self._slots[key] = slot
            self._used_bytes += slot.end - slot.offset
            self.counts.hold(self._used_bytes)
            return slot

    def publish(self, slot: Slot) -> None:
        """What the caller filled can be found from now on; it is still held. Nothing where `clear` came in between."""
        with self._lock:
            if self._is_known(slot) and not slot.is_published:
                slot.is_published = True
                self._slots.move_to_end(slot.key)
                self.counts.add(saved=1, saved_bytes=slot.num_bytes)

    def discard(self, slot: Slot) -> None:
        """The caller releases what it did not fill; it is never found, and its room is free again.

        Raises: ValueError where nobody holds it.
        """
        with self._lock:
            self._require_held(slot)
            if self._is_known(slot):
                del self._slots[slot.key]
            self._release(slot)

    def hold(self, slot: Slot) -> None:
        """Hold it once more, for another user. Raises: ValueError where nobody holds it."""
        with self._lock:
            self._require_held(slot)
            slot.num_holders += 1

    def release(self, slot: Slot) -> None:
        """End one hold. Raises: ValueError where nobody holds it."""
        with self._lock:
            self._release(slot)

    def clear(self) -> None:
        """Nothing that is here now is found any more; what is held goes when it is released."""
        with self._lock:
            for slot in list(self._slots.values()):
                if slot.num_holders:
                    del self._slots[slot.key]
                else:
                    self._let_go(slot)

    def _published(self, key: str) -> Slot | None:
        slot = self._slots.get(key)
        return slot if slot is not None and slot.is_published else None

    def _is_known(self, slot: Slot) -> bool:
        return self._slots.get(slot.key) is slot

    def _release(self, slot: Slot) -> None:
        self._require_held(slot)
        slot.num_holders -= 1
        is_kept = slot.is_published and self._is_known(slot) and (self.keeps or slot.pending_tiers or not slot.is_used)
        if not slot.num_holders and not is_kept:
            self._let_go(slot)

    def _let_go(self, slot: Slot) -> None:
        if self._is_known(slot):
            del self._slots[slot.key]
        _give(self._gaps, slot.offset, slot.end)
        self._used_bytes -= slot.end - slot.offset
        self.counts.hold(self._used_bytes)

    def _require_held(self, slot: Slot) -> None:
        if slot.num_holders < 1:
            raise ValueError(f"nobody holds {slot}")

    def _room(self, size: int) -> int | None:
        """Start of a gap of `size` bytes, after evicting what lies there; None, and nothing evicted, if that can't be.

        Slots count as free that nobody holds, those used longest ago first, until there is a gap. Only those in the
        gap are evicted: what was passed over on the way would have gone for nothing.
        """
        for low, high in self._gaps:
            if high - low >= size:
                return low
        if size > self._size:
            return None
        gaps, passed = list(self._gaps), []
        for slot in self._slots.values():
            if slot.num_holders:
                continue
            passed.append(slot)
            low, high = _give(gaps, slot.offset, slot.end)
            if high - low >= size:
                victims = [one for one in passed if low <= one.offset < low + size]
                for one in victims:
                    self._let_go(one)
                self.counts.add(evictions=len(victims))
                return low
        return None


def _give(gaps: Gaps, start: int, end: int) -> tuple[int, int]:
    """Make [start, end) free; returns the whole gap in which it lies then."""
    at = bisect(gaps, (start, end))
    first, last = at, at
    if at and gaps[at - 1][1] == start:
        first, start = at - 1, gaps[at - 1][0]
    if at < len(gaps) and gaps[at][0] == end:
        last, end = at + 1, gaps[at][1]
    gaps[first:last] = [(start, end)]
    return start, end
