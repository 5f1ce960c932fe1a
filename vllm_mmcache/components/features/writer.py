# SPDX-License-Identifier: Apache-2.0
"""A thread for each lasting tier that writes what is in RAM, so that no request waits, and no tier waits for another.

It also has the tier remove what is over, when the store is opened and from time to time. Its queue holds names, not
bytes: what is let go from RAM before its turn is dropped, and counted. What a tier did not take, since it was behind or
left alone, it is owed; it is handed over again when the image comes again. Engine process.
"""

import atexit
import math
import threading
from collections.abc import Callable
from time import monotonic

from vllm_mmcache.base import background
from vllm_mmcache.base.lru import Size
from vllm_mmcache.components.features.engine.ram_tier import RamTier
from vllm_mmcache.components.features.identity import Identity
from vllm_mmcache.components.features.lasting import LastingTier
from vllm_mmcache.components.features.package import Shape

EXIT_S = 5.0  # for what is still to be written when the process ends
MOST_WAITING = 65_536
TIDY_S = 3600.0  # between two looks for what is over; a quarter of the tier's ttl_s, where that is less


class Writer:
    """Writes to one tier in the order of arrival, from RAM."""

    def __init__(self, tier: LastingTier, ram: RamTier, buffer: Callable[[int, int], memoryview]) -> None:
        self.tier = tier
        self._ram = ram
        self._buffer = buffer
        self._changed = threading.Condition()
        self._waiting: dict[str, tuple[Identity, Shape]] = {}  # in order of arrival; the first one is being written
        self._thread: threading.Thread | None = None
        self._closed = False
        if tier.ttl_s:
            with self._changed:
                self._start()

    def hand(self, identity: Identity, shape: Shape) -> None:
        """Have a package written that is in RAM; never waits. One that is already waiting is not taken twice."""
        with self._changed:
            if identity.key in self._waiting:
                return
            if self._closed or len(self._waiting) >= MOST_WAITING:
                self.tier.counters.add(dropped=1)
                return
            self._waiting[identity.key] = (identity, shape)
            self._start()
            self._changed.notify_all()

    def size(self) -> Size:
        """How many wait; their bytes are RAM's."""
        return Size(len(self._waiting))

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was handed over is written or given up. Returns False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Flush, then take no more and end the thread, all within `timeout_s`. Returns what `flush` did."""
        deadline = monotonic() + timeout_s
        flushed = self.flush(timeout_s)
        with self._changed:
            self._closed = True
            self.tier.counters.add(dropped=len(self._waiting))
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - monotonic()))
        atexit.unregister(self.close)
        return flushed

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"mmcache-write-{self.tier.name}", daemon=True)
            self._thread.start()
            # A thread that works on memory while the interpreter ends can take the process down.
            atexit.register(self.close, EXIT_S)

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
                identity, shape = next(iter(self._waiting.values()))
            self._write(identity, shape)
            with self._changed:
                self._waiting.pop(identity.key, None)  # not there once closed
                self._changed.notify_all()

    def _write(self, identity: Identity, shape: Shape) -> None:
        slot = self._ram.hold_if_there(identity.key)
        if slot is None:
            self.tier.counters.add(dropped=1)
            return
        try:
            kept = self.tier.save(identity, shape, self._buffer(slot.offset, shape.num_bytes))
            if kept or shape.num_bytes > self.tier.max_bytes:  # which it never takes
                slot.pending_tiers.discard(self.tier.name)
        finally:
            self._ram.release(slot)
