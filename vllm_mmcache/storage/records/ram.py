# SPDX-License-Identifier: Apache-2.0
"""The nearest place of records: a table bounded by bytes, least recently used first. API server process, any thread."""

import threading
from collections import OrderedDict
from typing import NamedTuple

from vllm_mmcache.base.lru import Size

ENTRY_BYTES = 320  # what an entry takes beside its value's bytes; test_records.py measures it


class Entry(NamedTuple):
    """One record. Units: renewed_s are seconds since the epoch, when it was last written to the places below."""

    value: bytes
    renewed_s: float


class Ram:
    """Records by key, up to `budget_bytes` of memory, overhead included."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self._held_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Entry | None:
        """The entry under `key`, which counts as a use of it; None if there is none."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            return entry

    def put(self, key: bytes, entry: Entry) -> bool:
        """Keep the entry, instead of an older one under this key. Returns whether it fits; may evict others."""
        with self._lock:
            self._remove(key)
            if _cost(entry) > self._budget_bytes:
                return False
            self._entries[key] = entry
            self._held_bytes += _cost(entry)
            while self._held_bytes > self._budget_bytes:
                self._remove(next(iter(self._entries)))
            return True

    def remove(self, key: bytes) -> None:
        """Forget one."""
        with self._lock:
            self._remove(key)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._held_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def held_bytes(self) -> int:
        """Bytes that the entries take together, overhead included."""
        return self._held_bytes

    def size(self) -> Size:
        """Entries and bytes, and the budget."""
        return Size(len(self), self._held_bytes, self._budget_bytes)

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._held_bytes -= _cost(entry)


def _cost(entry: Entry) -> int:
    return len(entry.value) + ENTRY_BYTES
