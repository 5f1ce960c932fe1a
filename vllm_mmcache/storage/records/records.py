# SPDX-License-Identifier: Apache-2.0
"""Records over all places, nearest first. API server process, any thread; nothing here raises."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.base.settings import Settings, store_in_use
from vllm_mmcache.metrics import table_sizes
from vllm_mmcache.storage import encryption
from vllm_mmcache.storage.frame import MAX_VALUE_BYTES
from vllm_mmcache.storage.records.place import Counts, Place
from vllm_mmcache.storage.records.ram import Entry, Ram
from vllm_mmcache.storage.records.writer import EXIT_S, Writer

logger = logging.getLogger("vllm.mmcache")

T = TypeVar("T")

RENEW_S = 3600.0
"""A record that is used is written again so long after it was written, or after half the time that it is kept, so that
it does not go as one of the oldest."""


class Records:
    """Small values by key, in all places. A value is found until it is evicted, also by later and other processes."""

    def __init__(self, ram_bytes: int, below: Sequence[Place] = ()) -> None:
        self._ram = Ram(ram_bytes)
        table_sizes.of_server("records", self._ram.size)
        self._in_ram = Counts("ram")
        self._below = tuple(below)
        self._writer = Writer(self._below)
        self.renew_s = min([RENEW_S, *(place.ttl_s / 2 for place in self._below if place.ttl_s)])
        """Seconds after which a record that is used is written again."""
        table_sizes.of_server("records_waiting", self._writer.size)

    @classmethod
    def of(cls, settings: Settings) -> "Records":
        """The records that these settings ask for. A place that can't be used is left out, with a line in the log."""
        below: list[Place] = []
        try:
            directory, url = store_in_use(settings)
            codec = encryption.of(settings.store_key_file)
        except SettingsError as error:
            logger.warning("mmcache keeps records in RAM alone: %s", error)
            return cls(settings.records_ram_bytes)
        if directory is not None and settings.records_disk_bytes:
            from vllm_mmcache.storage.records.disk import DiskPlace

            below.append(DiskPlace(directory, settings.records_disk_bytes, ttl_s=settings.store_ttl, codec=codec))
        if url is not None:
            from vllm_mmcache.storage.records.remote import RemotePlace  # imports redis

            try:
                timeout_s = settings.store_remote_timeout_s
                below.append(RemotePlace(url, ttl_s=settings.store_ttl, timeout_s=timeout_s, codec=codec))
            except SettingsError as error:
                logger.warning("mmcache keeps no records there: %s", error)
        return cls(settings.records_ram_bytes, below)

    def get(self, key: bytes) -> bytes | None:
        """The value that was put under `key`, whole; None for a miss, whatever the reason is."""
        return self.read(key, bytes)

    def read(self, key: bytes, read: Callable[[bytes], T | None]) -> T | None:
        """What `read` makes of the value under `key`; None for a miss, whatever the reason is.

        read: gives None for a value that can't have been put there by us. It is counted as corrupt where it lies, and
        places that are farther are asked.
        """
        with failsafe("records"):
            return self._get(key, read)
        return None

    def put(self, key: bytes, value: bytes) -> None:
        """Keep `value`, at most MAX_VALUE_BYTES of it; found at once by this process, soon by others."""
        with failsafe("records"):
            if len(value) > MAX_VALUE_BYTES:
                for counts in (self._in_ram, *(place.counts for place in self._below)):
                    counts.add(dropped=1)
            else:
                self._keep(key, Entry(value, time.time()))
                self._write(key, value)

    def flush(self, timeout_s: float = EXIT_S) -> bool:
        """Wait until all that was put is written or given up. Returns False after `timeout_s`."""
        return self._writer.flush(timeout_s)

    def clear(self) -> None:
        """Forget everything, in every place but Redis or Valkey, where it expires."""
        self._writer.forget()
        self._writer.flush(EXIT_S)
        self._ram.clear()
        for place in self._below:
            place.clear()

    def close(self, timeout_s: float = EXIT_S) -> bool:
        """Flush, then end the thread and let go of files. Returns what `flush` did."""
        flushed = self._writer.close(timeout_s)
        for place in self._below:
            place.close()
        return flushed

    def counts(self) -> dict[str, dict[str, int]]:
        """By place (ram, disk, remote), what was counted since this was opened; of RAM, also entries and bytes."""
        ram = self._in_ram.snapshot() | {"entries": len(self._ram), "bytes": self._ram.held_bytes}
        return {"ram": ram} | {place.name: place.counts.snapshot() for place in self._below}

    def _get(self, key: bytes, read: Callable[[bytes], T | None]) -> T | None:
        entry = self._ram.get(key)
        found = None if entry is None else read(entry.value)
        self._in_ram.add(hits=found is not None, misses=found is None)
        if entry is not None and found is None:
            self._in_ram.add(corrupt=1)
            self._ram.remove(key)
        if entry is None or found is None:
            hit = next(filter(None, (place.read(key, read) for place in self._below)), None)
            if hit is None:
                return None
            entry, found = hit
            self._keep(key, entry)
        if abs(time.time() - entry.renewed_s) > self.renew_s:
            self._keep(key, entry._replace(renewed_s=time.time()))
            self._write(key, entry.value)
        return found

    def _keep(self, key: bytes, entry: Entry) -> None:
        kept = self._ram.put(key, entry)
        self._in_ram.add(saved=kept, dropped=not kept)

    def _write(self, key: bytes, value: bytes) -> None:
        if self._below:
            self._writer.hand(key, value)
