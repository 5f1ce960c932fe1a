# SPDX-License-Identifier: Apache-2.0
"""The base class of the places beyond RAM where records are stored: it checks frames, counts, and rests after failures.

`get` runs in the threads that ask, `save` in the thread that writes. Neither ever raises: a failure is counted, and the
place is left alone for a while.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TypeVar

from vllm_mmcache.base.errors import StoreCorrupt
from vllm_mmcache.metrics import counters
from vllm_mmcache.storage.breaker import Breaker
from vllm_mmcache.storage.encryption import PLAIN, PlainCodec
from vllm_mmcache.storage.frame import frame, unframe
from vllm_mmcache.storage.records.ram import Entry

logger = logging.getLogger("vllm.mmcache")

T = TypeVar("T")


class Counts:
    """Counts of one place, which are also added to those on /metrics."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._totals = dict.fromkeys(counters.RECORD_COUNTERS, 0)
        self._lock = threading.Lock()

    def add(self, **amounts: int) -> None:
        """Count by name; the names are those of counters.RECORD_COUNTERS."""
        for name, amount in amounts.items():
            if amount:
                with self._lock:
                    self._totals[name] += amount
                counters.RECORD_COUNTERS[name].add(amount, self._place)

    def snapshot(self) -> dict[str, int]:
        """All sums by name."""
        with self._lock:
            return dict(self._totals)


class Place(ABC):
    """Frames by key. A subclass reads and writes; this class checks, counts and gives up."""

    name: str
    failures: tuple[type[Exception], ...]
    """What reading and writing may raise when the place can't serve."""
    ttl_s: int = 0
    """Seconds that a record is kept without use; 0 for ever."""

    def __init__(self, where: str, rest_s: float, longest_rest_s: float, codec: PlainCodec = PLAIN) -> None:
        self.counts = Counts(self.name)
        self._codec = codec
        self._reading = Breaker(f"records in {where} (reading)", rest_s, longest_rest_s)
        # Apart: what a full disk or server holds can still be read.
        self._writing = Breaker(f"records in {where} (writing)", rest_s, longest_rest_s)

    def get(self, key: bytes) -> Entry | None:
        """The record under `key`; None for a miss, whatever the reason is. Never raises."""
        hit = self.read(key, bytes)
        return None if hit is None else hit[0]

    def read(self, key: bytes, read: Callable[[bytes], T | None]) -> tuple[Entry, T] | None:
        """The record under `key`, and what `read` returns for its value; None for a miss.

        read: returns None for a value that is no such record, which is a miss, too. Never raises.
        """
        entry, found = None, None
        if not self._reading.resting():
            try:
                entry = self._read(key)
                self._reading.worked()
            except self.failures as error:
                self._fail(self._reading, error)
            except Exception:  # a bug of ours must not reach a request
                self.counts.add(errors=1)
                logger.exception("mmcache could not read a record; serving goes on without it")
        if entry is not None:
            found = read(entry.value)
            self.counts.add(corrupt=found is None)  # the next one who puts this key writes over it
        self.counts.add(hits=found is not None, misses=found is None)
        return None if entry is None or found is None else (entry, found)

    def save(self, values: Mapping[bytes, bytes]) -> None:
        """Keep these values by key; what could not be kept is counted as dropped. Never raises."""
        num_kept = 0
        if not self._writing.resting():
            try:
                num_kept = self._save(dict(self._encrypted(key, value) for key, value in values.items()))
                self._writing.worked()
            except self.failures as error:
                self._fail(self._writing, error)
            except Exception:  # a bug of ours must not end the writer
                self.counts.add(errors=1)
                logger.exception("mmcache could not save records; serving goes on without them")
        self.counts.add(saved=num_kept, dropped=len(values) - num_kept)

    def tidy(self) -> None:
        """Remove records that are past their time or over the budget, if the place needs that. Never raises."""
        if self._writing.resting():
            return
        try:
            self._tidy()
        except self.failures as error:
            self._fail(self._writing, error)
        except Exception:  # a bug of ours must not end the writer
            self.counts.add(errors=1)
            logger.exception("mmcache could not tidy its records; serving goes on")

    @abstractmethod
    def clear(self) -> None:
        """Remove all records, unless the place is shared with others. Never raises."""

    @abstractmethod
    def close(self) -> None:
        """Close files and connections. Never raises."""

    def _fail(self, breaker: Breaker, error: object) -> None:
        self.counts.add(errors=1)
        breaker.failed(error)

    def _read(self, key: bytes) -> Entry | None:
        name = self._codec.name(key)
        found = self._load(name)
        if found is None:
            return None
        encrypted, written_s = found
        value = value_in(name, encrypted, self._codec)
        if value is None:  # the next one who puts this key writes over it
            self.counts.add(corrupt=1)
            return None
        return Entry(value, written_s)

    def _tidy(self) -> None:  # noqa: B027
        """As `tidy`. Raises: one of `failures`."""

    def _encrypted(self, key: bytes, value: bytes) -> tuple[bytes, bytes]:
        name = self._codec.name(key)
        return name, self._codec.encrypt(name, frame(name, value))

    @abstractmethod
    def _load(self, key: bytes) -> tuple[bytes, float] | None:
        """The frame under `key`, and when it was written, in seconds since the epoch. Raises: one of `failures`."""

    @abstractmethod
    def _save(self, frames: Mapping[bytes, bytes]) -> int:
        """Store these frames, instead of older ones. Returns how many were stored. Raises: one of `failures`."""


def value_in(name: bytes, entry: bytes, codec: PlainCodec) -> bytes | None:
    """The value of the record in the bytes of the entry `name`; None if it holds no whole record."""
    try:
        return unframe(name, codec.decrypt(name, entry))
    except StoreCorrupt:
        return None
