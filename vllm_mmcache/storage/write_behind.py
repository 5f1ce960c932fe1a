# SPDX-License-Identifier: Apache-2.0
"""A queue in front of a tier, and the one thread that writes what is in it, so that no request waits for a write.

The thread also has the tier remove what is over its time or over the budget, when it starts and from time to time. What
comes while it is far behind is dropped and counted. No tier waits for another: each has a queue of its own.
"""

import atexit
import math
import os
import threading
from collections.abc import Callable, Hashable, Mapping
from time import monotonic
from typing import Generic, TypeVar

from vllm_mmcache.base import background
from vllm_mmcache.base.lru import Budget, Size
from vllm_mmcache.base.worker_threads import start_thread
from vllm_mmcache.storage.tier import Tier

EXIT_S = 5.0  # for what is still to be written when the process ends
MOST_WAITING = 65_536
TIDY_S = 3600.0  # between two looks for what is over; a quarter of the tier's ttl_s, where that is less

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class WriteBehind(Generic[K, T]):
    """Hands items to `write` in the order in which their keys arrived, some at a time.

    write: called by the thread with items by key; must not raise. budget: how many items may wait, and their bytes.
    batch: `write` gets no more items once one of these two is reached. cost: the bytes of an item; None where bytes are
    not limited here.
    """

    def __init__(
        self,
        tier: Tier,
        write: Callable[[Mapping[K, T]], None],
        *,
        budget: Budget,
        batch: Budget,
        cost: Callable[[T], int] | None = None,
    ) -> None:
        self.tier = tier
        self._write = write
        self._budget = budget
        self._batch = batch
        self._cost = cost
        self._changed = threading.Condition()
        self._waiting: dict[K, T] = {}  # in order of arrival
        self._waiting_bytes = 0
        self._written: dict[K, T] = {}  # being written now
        self._thread: threading.Thread | None = None
        self._closed = False
        self._process = os.getpid()
        if tier.ttl_s:
            with self._changed:
                self._start()

    def submit(self, key: K, item: T) -> None:
        """Queue an item for writing, instead of one that waits under the same key; never waits for a write.

        An item that equals the one that waits, or else the one that is being written, is ignored. One that finds no
        room, or comes after `drop` or `close`, is dropped and counted; what waits under its key stays. So is one for
        which the machine has no thread; the next one has it started.
        """
        with self._changed:
            former = self._waiting.get(key)
            if item == (self._written.get(key) if former is None else former):
                return
            if self._closed or not self._start() or not self._has_room(former, item):
                self.tier.counts.add(dropped=1)
                return
            self._waiting[key] = item
            self._changed.notify_all()

    def size(self) -> Size:
        """Items that wait or are being written, the bytes of those that wait, and how many bytes may."""
        num_entries = len(self._waiting) + len(self._written)
        if self._cost is None:
            return Size(num_entries)
        return Size(num_entries, self._waiting_bytes, self._budget.size_bytes)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was submitted is written or given up. Returns False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._written, timeout_s)

    def forget(self) -> None:
        """Discard what is waiting, without counting it."""
        with self._changed:
            self._waiting.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()

    def drop(self) -> None:
        """Take no more, and drop what is waiting, counted; what is being written now is written."""
        with self._changed:
            self._closed = True
            self.tier.counts.add(dropped=len(self._waiting))
            self.forget()

    def close(self, timeout_s: float) -> bool:
        """Flush, then take no more and end the thread, all within `timeout_s`. Returns what `flush` did.

        In a forked child, which has no such thread, it does nothing: the parent writes what waits.
        """
        if self._process != os.getpid():
            return False
        deadline = monotonic() + timeout_s
        flushed = self.flush(timeout_s)
        self.drop()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - monotonic()))
        atexit.unregister(self.close)
        return flushed

    def _has_room(self, former: T | None, item: T) -> bool:
        """Whether an item may wait, instead of a former one, if there is one; its bytes are added."""
        if former is None and len(self._waiting) >= self._budget.entries:
            return False
        if self._cost is not None:
            waiting_bytes = self._waiting_bytes + self._cost(item) - (0 if former is None else self._cost(former))
            if waiting_bytes > self._budget.size_bytes:
                return False
            self._waiting_bytes = waiting_bytes
        return True

    def _start(self) -> bool:
        """Whether the thread is there, which is started if it is not."""
        if self._thread is None:
            self._thread = start_thread(self._run, f"mmcache-{self.tier.kind.name}-{self.tier.name}")
            if self._thread is not None:
                # A thread that works on memory while the interpreter ends can take the process down.
                atexit.register(self.close, EXIT_S)
        return self._thread is not None

    def _run(self) -> None:
        background.lower_priority()
        pause_s = min(TIDY_S, self.tier.ttl_s / 4) if self.tier.ttl_s else None
        tidied = -math.inf
        while True:
            if pause_s is not None and monotonic() - tidied > pause_s:
                self.tier.tidy()
                tidied = monotonic()
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed, pause_s)
                if self._closed:
                    return
                if not self._waiting:
                    continue
                self._written = self._take()
            self._write(self._written)
            with self._changed:
                self._written = {}
                self._changed.notify_all()

    def _take(self) -> dict[K, T]:
        batch: dict[K, T] = {}
        num_bytes = 0
        while self._waiting and num_bytes < self._batch.size_bytes and len(batch) < self._batch.entries:
            key = next(iter(self._waiting))
            batch[key] = self._waiting.pop(key)
            num_bytes += 0 if self._cost is None else self._cost(batch[key])
        self._waiting_bytes -= num_bytes
        return batch
