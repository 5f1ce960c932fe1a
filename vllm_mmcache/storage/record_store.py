# SPDX-License-Identifier: Apache-2.0
"""What was learned of images and videos, stored under a key of everything that it depends on. API server process.

A record is a few hundred bytes that save decoding an image, or a run of vLLM's processor. It is kept in RAM, in the
store's directory and in Redis or Valkey, so that it is found after a restart and by other servers. Whatever goes wrong
is a miss: asking never raises, and whoever asks can always do the work again. Any thread.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from vllm_mmcache.base import settings
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.base.lru import Budget, LruTable, Size
from vllm_mmcache.base.settings import Settings
from vllm_mmcache.metrics import counters, table_sizes
from vllm_mmcache.storage.frame import FORMAT, MAX_VALUE_BYTES
from vllm_mmcache.storage.kind import Kind
from vllm_mmcache.storage.open import open_tiers
from vllm_mmcache.storage.tier import Tier, Value
from vllm_mmcache.storage.tier_counts import TierCounts
from vllm_mmcache.storage.write_behind import EXIT_S, MOST_WAITING, WriteBehind

RECORDS = Kind(
    name="records",
    format=FORMAT,
    said="records in {}",
    counters=counters.RECORD_COUNTERS,
    rejected="corrupt",
    disk_budget="records_disk_bytes",
    is_small=True,
    held_gauge=counters.RECORD_DISK_BYTES,
    budget_gauge=counters.RECORD_DISK_BUDGET_BYTES,
)

RENEW_S = 3600.0
"""A record that is used is written again so long after it was written, or after half the time that it is kept, so that
it does not go as one of the oldest."""
MOST_WAITING_BYTES = 16 * 1024**2
BATCH = Budget(256, 1024**2)
ENTRY_BYTES = 320  # what a record takes in RAM beside its value's bytes; measured in tests/unit/storage

T = TypeVar("T")


class RecordStore:
    """Small values by key, in RAM and in tiers. A value is found until it is evicted, also by later processes."""

    def __init__(self, ram_bytes: int, tiers: Sequence[Tier] = ()) -> None:
        budget = Budget(ram_bytes // ENTRY_BYTES, ram_bytes)
        self._ram: LruTable[bytes, Value] = LruTable(lambda: budget, lambda value: len(value.content) + ENTRY_BYTES)
        self._in_ram = TierCounts(RECORDS, "ram")
        self._tiers = tuple(tiers)
        waiting = Budget(MOST_WAITING, MOST_WAITING_BYTES)
        self._writers = [
            WriteBehind[bytes, bytes](tier, tier.put_many, budget=waiting, batch=BATCH, cost=len)
            for tier in self._tiers
        ]
        self.renew_s = min([RENEW_S, *(tier.ttl_s / 2 for tier in self._tiers if tier.ttl_s)])
        """Seconds after which a record that is used is written again."""
        table_sizes.of_server("records", self._ram.size)
        table_sizes.of_server("records_waiting", self.waiting)

    @classmethod
    def of(cls, settings: Settings) -> "RecordStore":
        """The records that these settings ask for. A tier that can't be used is left out, with a line in the log."""
        return cls(settings.records_ram_bytes, open_tiers(settings, RECORDS, leaves_out=True))

    def read(self, key: bytes, read: Callable[[bytes], T | None]) -> T | None:
        """What `read` makes of the value under `key`; None for a miss, whatever the reason is.

        read: gives None for a value that can't have been put there by us. It is counted as corrupt where it lies, and
        tiers that are farther are asked.
        """
        with failsafe("records"):
            return self._get(key, read)
        return None

    def put(self, key: bytes, value: bytes) -> None:
        """Keep `value`, at most MAX_VALUE_BYTES of it; found at once by this process, soon by others."""
        with failsafe("records"):
            if len(value) > MAX_VALUE_BYTES:
                for counts in (self._in_ram, *(tier.counts for tier in self._tiers)):
                    counts.add(dropped=1)
            else:
                self._keep(key, Value(value, time.time()))
                self._write(key, value)

    def flush(self, timeout_s: float = EXIT_S) -> bool:
        """Wait until all that was put is written or given up. Returns False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        flushed = [writer.flush(max(0.0, deadline - time.monotonic())) for writer in self._writers]
        return all(flushed)

    def clear(self) -> None:
        """Forget everything, in every tier but one that other machines share, where it expires."""
        for writer in self._writers:
            writer.forget()
        self.flush()
        self._ram.clear()
        for tier in self._tiers:
            tier.clear()

    def close(self, timeout_s: float = EXIT_S) -> bool:
        """Flush, then end the threads and let go of files, within about `timeout_s`. Returns what `flush` did."""
        deadline = time.monotonic() + timeout_s
        closed = [writer.close(max(0.1, deadline - time.monotonic())) for writer in self._writers]
        for tier in self._tiers:
            tier.close()
        return all(closed)

    def waiting(self) -> Size:
        """What waits to be written, and what may, in all tiers together."""
        sizes = [writer.size() for writer in self._writers]
        return Size(*(sum(size[what] or 0 for size in sizes) for what in range(len(Size._fields))))

    def counts(self) -> dict[str, dict[str, float]]:
        """By tier (ram, disk, remote), what was counted since this was opened; of RAM, also entries and bytes."""
        ram = self._in_ram.snapshot() | {"entries": len(self._ram), "bytes": self._ram.size_bytes}
        return {"ram": ram} | {tier.name: tier.counts.snapshot() for tier in self._tiers}

    def _get(self, key: bytes, read: Callable[[bytes], T | None]) -> T | None:
        value = self._ram.get(key)
        found = None if value is None else read(value.content)
        self._in_ram.add(hits=found is not None, misses=found is None)
        if value is not None and found is None:
            self._in_ram.add(corrupt=1)
            self._ram.remove(key)
        if value is None or found is None:
            hit = next(filter(None, (tier.get(key, read) for tier in self._tiers)), None)
            if hit is None:
                return None
            value, found = hit
            self._keep(key, value)
        if abs(time.time() - value.written_s) > self.renew_s:
            self._keep(key, value._replace(written_s=time.time()))
            self._write(key, value.content)
        return found

    def _keep(self, key: bytes, value: Value) -> None:
        self._ram.replace(key, value)
        is_kept = key in self._ram
        self._in_ram.add(saved=is_kept, dropped=not is_kept)

    def _write(self, key: bytes, content: bytes) -> None:
        for writer in self._writers:
            writer.submit(key, content)


_current: tuple[Settings, RecordStore] | None = None
_opening = threading.Lock()


def current() -> RecordStore:
    """The records of this process, opened on first use by the settings in force. Any thread; never raises."""
    global _current
    chosen = settings.current()
    opened = _current
    if opened is not None and opened[0] is chosen:
        return opened[1]
    with _opening:
        opened = _current
        if opened is None or opened[0] != chosen:
            if opened is not None:
                opened[1].close()
            opened = chosen, RecordStore.of(chosen)
        _current = chosen, opened[1]
        return opened[1]


def close() -> None:
    """Write what is waiting, and let go of files and memory; the next `current` opens them anew."""
    global _current
    with _opening:
        opened, _current = _current, None
    if opened is not None:
        opened[1].close()


def _after_fork() -> None:
    """A child has records of its own: connections and threads don't survive a fork."""
    global _current, _opening
    _current, _opening = None, threading.Lock()


# A thread that works while the interpreter ends can take the process down.
atexit.register(close)
os.register_at_fork(after_in_child=_after_fork)
