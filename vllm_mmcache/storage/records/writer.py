# SPDX-License-Identifier: Apache-2.0
"""The one thread that writes records to the places beyond RAM, many at a time, so that no request waits for them.

It also has the places remove records that are past their time or over the budget, when they are opened and from time
to time. Records that come while it is far behind are dropped and counted. API server process.
"""

import math
import threading
from collections.abc import Sequence
from time import monotonic

from vllm_mmcache.base import background
from vllm_mmcache.base.lru import Size
from vllm_mmcache.storage.records.place import Place

MOST_WAITING_BYTES = 16 * 1024**2
MOST_WAITING = 65_536
BATCH_BYTES = 1024**2
MOST_AT_ONCE = 256
TIDY_S = 3600.0  # between two looks for what is over; a quarter of the places' ttl_s, where that is less
EXIT_S = 5.0  # for what is still to be written when the process ends


class Writer:
    """Writes to all places in the order of arrival."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._changed = threading.Condition()
        self._waiting: dict[bytes, bytes] = {}
        self._waiting_bytes = 0
        self._is_writing = False
        self._thread: threading.Thread | None = None
        self._closed = False
        if any(place.ttl_s for place in places):
            with self._changed:
                self._start()

    def hand(self, key: bytes, value: bytes) -> None:
        """Have a value written; never waits."""
        with self._changed:
            more = len(value) - len(self._waiting.get(key, b""))
            full = len(self._waiting) >= MOST_WAITING or self._waiting_bytes + more > MOST_WAITING_BYTES
            if self._closed or full:
                for place in self._places:
                    place.counts.add(dropped=1)
                return
            self._waiting[key] = value
            self._waiting_bytes += more
            self._start()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was handed over is written or given up. Returns False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._is_writing, timeout_s)

    def size(self) -> Size:
        """What waits, and what may."""
        return Size(len(self._waiting), self._waiting_bytes, MOST_WAITING_BYTES)

    def forget(self) -> None:
        """Leave what is waiting."""
        with self._changed:
            self._waiting.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Flush, then take no more and end the thread, all within `timeout_s`. Returns what `flush` did."""
        deadline = monotonic() + timeout_s
        flushed = self.flush(timeout_s)
        with self._changed:
            self._closed = True
        self.forget()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - monotonic()))
        return flushed

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mmcache-records", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        background.lower_priority()
        kept_s = [place.ttl_s for place in self._places if place.ttl_s]
        pause_s = min(TIDY_S, min(kept_s) / 4) if kept_s else None
        tidied = -math.inf
        while True:
            if pause_s is not None and monotonic() - tidied > pause_s:
                for place in self._places:
                    place.tidy()
                tidied = monotonic()
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closed, pause_s)
                if self._closed:
                    return
                if not self._waiting:
                    continue
                batch = self._take()
                self._is_writing = True
            for place in self._places:
                place.save(batch)

    def _take(self) -> dict[bytes, bytes]:
        batch: dict[bytes, bytes] = {}
        num_bytes = 0
        while self._waiting and num_bytes < BATCH_BYTES and len(batch) < MOST_AT_ONCE:
            key = next(iter(self._waiting))
            batch[key] = self._waiting.pop(key)
            num_bytes += len(batch[key])
        self._waiting_bytes -= num_bytes
        return batch
