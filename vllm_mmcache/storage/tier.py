# SPDX-License-Identifier: Apache-2.0
"""A tier of one kind of content beyond RAM: a backend, a codec, two circuit breakers and counts.

Large content is streamed: `load` checks every byte with the caller's checker while it fills the caller's memory, `put`
writes parts. Small values are read and written as a whole, in frames (frame.py): `get` and `put_many`. Whatever goes
wrong is a miss, or content that is not kept, and is counted. After a failure of the backend the tier is left alone for
a while. None of these four nor `tidy` raises, but for what `get` is given to call. None holds a lock of this process
while it waits for a disk or a network.

Any thread: `load` and `get` run where a request may wait, the others in background threads and the command line.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from vllm_mmcache.base.errors import StoreCorrupt, StoreForeign, StoreKeyMismatch, StoreUnreadable
from vllm_mmcache.base.lru import Size
from vllm_mmcache.storage.backend import (
    Backend,
    Buffer,
    Busy,
    BytesEntry,
    DeadlineExceeded,
    OpenEntry,
    PartUnavailable,
    Source,
    Usage,
)
from vllm_mmcache.storage.breaker import CircuitBreaker
from vllm_mmcache.storage.encryption import PLAIN, PlainCodec
from vllm_mmcache.storage.frame import HEAD_BYTES, MAX_VALUE_BYTES, frame, unframe
from vllm_mmcache.storage.kind import Kind
from vllm_mmcache.storage.tier_counts import TierCounts

logger = logging.getLogger("vllm.mmcache")

PIECE_BYTES = 4 * 1024**2
"""Content is read in pieces of this size: between two of them a load looks at the time."""
HUNG_S = 1.0
"""A load that is still on its way so long after it should have given up hangs."""
GET_S = 10.0
"""What a value may take that a request waits for; a backend whose reads can wait gives up long before."""
# The head of other content than was asked for, to say what it is; a right one is seldom longer.
_SEEN_BYTES = 4096

T = TypeVar("T")


class Checker(Protocol):
    """Says of content, as it arrives, whether it is what was asked for. Each method raises StoreCorrupt if it isn't."""

    num_head_bytes: int
    """Bytes before those that the caller wants."""
    num_bytes: int
    """Bytes that the caller wants."""

    def begin(self, seen: Buffer, num_bytes: int) -> None:
        """Look at the first bytes of content that has `num_bytes` in all.

        seen: `num_head_bytes` of them or more, or all that there are.
        """

    def add(self, piece: Buffer) -> None:
        """The next bytes of those that the caller wants."""

    def end(self) -> None:
        """All of them came."""


class Value(NamedTuple):
    """A small value. Units: written_s are seconds since the epoch, when the tier last wrote it; 0 if unknown."""

    content: bytes
    written_s: float


class Tier:
    """Content of one kind in one backend, checked, counted, and encrypted where the codec does that.

    rest_s: how long it is left alone after a failure, and at most; the backend knows what fits.
    """

    def __init__(
        self, kind: Kind, backend: Backend, codec: PlainCodec = PLAIN, rest_s: tuple[float, float] | None = None
    ) -> None:
        self.kind = kind
        self.backend = backend
        self.codec = codec
        self.name = backend.tier
        self.counts = TierCounts(kind, self.name)
        self.where = kind.said.format(backend.where)
        """What log lines call it."""
        self._reading = CircuitBreaker(f"{self.where} (reading)", *(rest_s or backend.rest_s))
        # Apart: what a full disk or server holds can still be read.
        self._writing = CircuitBreaker(f"{self.where} (writing)", *(rest_s or backend.rest_s))
        self._most_value_bytes = codec.num_bytes(HEAD_BYTES + MAX_VALUE_BYTES)  # of an entry with a small value
        self._loads: dict[object, float] = {}  # on their way: when each should give up

    @property
    def ttl_s(self) -> int:
        """Seconds that content is kept without use; 0 for ever."""
        return self.backend.ttl_s

    @property
    def max_bytes(self) -> int:
        """The most that the content of one entry may have; larger content is not kept."""
        return self.backend.max_bytes

    def size(self) -> Size:
        """What the tier holds, as this process last saw, and what it may hold; nothing where that is a server's."""
        if self.backend.budget_bytes is None:
            return Size()
        return Size(bytes=self.counts.held_bytes, budget_bytes=self.backend.budget_bytes)

    def is_open(self) -> bool:
        """Whether the circuit is open: loads are skipped for a time after a failure, and while another load hangs."""
        hung = time.monotonic() - HUNG_S
        return self._reading.is_open() or any(until < hung for until in list(self._loads.values()))

    def is_taking(self) -> bool:
        """Whether something may be written now: not while the tier is left alone after a write that failed."""
        return not self._writing.is_open()

    def load(self, key: bytes, checker: Checker, reserve: Callable[[], memoryview | None], until: float) -> bool:
        """Fill the memory that `reserve` gives with exactly what the checker was made for; whether it did.

        reserve: called at most once, when there is content that fits; gives `checker.num_bytes` writable bytes, or None
        where there is no room (a miss, and counted as dropped). After False their content is undefined; the caller
        gives them back.
        until: the time by time.monotonic() when it gives up, looked at between pieces. Never raises.
        """
        filled = False
        start = time.perf_counter()
        if checker.num_bytes <= self.max_bytes and time.monotonic() < until and not self.is_open():
            load = object()
            self._loads[load] = until
            try:
                filled = self._attempt(self._reading, lambda: self._load(key, checker, reserve, until)) or False
            finally:
                del self._loads[load]
        self.counts.add(
            hits=filled,
            misses=not filled,
            read_bytes=checker.num_bytes if filled else 0,
            load_s=time.perf_counter() - start,
        )
        return filled

    def put(self, key: bytes, content: Callable[[], list[Buffer]], num_bytes: int) -> bool:
        """Keep content of about `num_bytes`; whether it is kept, now or since before.

        content: called only where it is not kept yet; gives the parts that follow each other. Never raises.
        """
        written: int | None = None
        start = time.perf_counter()
        if num_bytes <= self.max_bytes and self.is_taking():
            written = self._attempt(self._writing, lambda: self._put(key, content))
        if written is None:
            self.counts.add(dropped=1)
            return False
        self.counts.add(saved=written > 0, saved_bytes=written, save_s=time.perf_counter() - start)
        return True

    def get(self, key: bytes, read: Callable[[bytes], T | None]) -> tuple[Value, T] | None:
        """The small value under `key`, and what `read` returns for its content; None for a miss.

        read: returns None for content that is none of this kind, which is a miss, too. What it raises is raised.
        """
        value, found = None, None
        if not self._reading.is_open():
            value = self._attempt(self._reading, lambda: self._get(key))
        if value is not None:
            found = read(value.content)
            if found is None:
                self.counts.add(**{self.kind.rejected: 1})
        self.counts.add(hits=found is not None, misses=found is None)
        return None if value is None or found is None else (value, found)

    def put_many(self, values: Mapping[bytes, bytes]) -> None:
        """Keep small values by key, instead of older ones; what can't be kept is counted as dropped. Never raises."""
        num_kept = 0
        named = {self.codec.name(key): value for key, value in values.items()}
        for names in self.backend.groups(list(named)):
            if not self.is_taking():
                break
            usage = self._attempt(self._writing, partial(self._put_values, {name: named[name] for name in names}))
            if usage is not None:
                num_kept += len(names)
                self._note(usage)
        self.counts.add(saved=num_kept, dropped=len(values) - num_kept)

    def tidy(self) -> None:
        """Remove what is over its time or over the budget, where that does not happen by itself. Never raises."""
        if self.ttl_s and self.is_taking():
            self._attempt(self._writing, self._tidy)

    def sweep(self) -> Usage:
        """As `tidy`, now, for the command line. Raises: one of the backend's failures."""
        return self.backend.sweep()

    def check(self, check: Callable[[bytes, bytearray], None]) -> tuple[int, list[tuple[str, str]]]:
        """Look at every byte, and take out what is damaged.

        check: called with an entry's name and content; raises StoreCorrupt, or StoreForeign for another version's.
        Returns how many entries are good and, of each that was not, what it is called and why it was taken out. What
        another key has encrypted, or another version written, is left alone. Raises: one of the backend's failures.
        """
        num_good, bad = 0, []
        for info in self.backend.scan():
            try:
                with self.backend.open(info.name) as entry:
                    if entry is None:  # evicted meanwhile
                        continue
                    source = self.codec.decrypt(info.name, entry)
                    content = bytearray(source.num_bytes)
                    source.read_into(0, memoryview(content), math.inf)
                check(info.name, content)
                num_good += 1
            except (StoreKeyMismatch, StoreForeign):
                continue
            except StoreCorrupt as error:
                self.backend.reject(info.name)
                bad.append((info.name.hex(), str(error)))
        return num_good, bad

    def clear(self) -> None:
        """Forget everything, unless other machines share it; what can't be removed stays. Never raises."""
        if not self.backend.is_shared:
            with suppress(*self.backend.failures):
                self.backend.clear()

    def close(self) -> None:
        """Let go of files and connections. Never raises."""
        self.backend.close()

    def _attempt(self, breaker: CircuitBreaker, work: Callable[[], T]) -> T | None:
        """What `work` returns; None where it fails, which is counted. Only the backend's failures open the breaker."""
        try:
            result = work()
        except DeadlineExceeded:
            self.counts.add(errors=1)
        except PartUnavailable as error:
            self.counts.add(errors=error.is_new)
        except self.backend.failures as error:
            self.counts.add(errors=1)
            breaker.record_failure(self.backend.recover(error))
        except Exception:  # a bug of ours must not reach a request, nor end a thread
            self.counts.add(errors=1)
            logger.exception("mmcache: a bug in the tier of %s; serving goes on without it", breaker.name)
        else:
            breaker.record_success()
            return result
        return None

    def _load(self, key: bytes, checker: Checker, reserve: Callable[[], memoryview | None], until: float) -> bool:
        name = self.codec.name(key)
        try:
            with self.backend.open(name) as entry:
                if entry is None:
                    return False
                try:
                    filled = self._fill(self.codec.decrypt(name, entry), checker, reserve, until)
                except StoreCorrupt:
                    if entry.is_current():
                        raise
                    return False  # replaced or removed meanwhile: nothing is known of what lies there now
                if filled:
                    entry.mark_used()
                return filled
        except Busy:
            return False
        except StoreCorrupt as error:
            log = logger.debug if self.counts.snapshot()[self.kind.rejected] else logger.warning
            log("mmcache %s set aside %s: %s (further ones at log level debug)", self.name, name.hex(), error)
            self.counts.add(**{self.kind.rejected: 1})
            self._reject(name, error, log)
            return False

    def _reject(self, name: bytes, reason: StoreCorrupt, log: Callable[..., None]) -> None:
        """Take a damaged entry out of service. Where that can't be, on a read-only disk, it is read again next time.

        Raises: one of the backend's failures, if the entry could not be read, either.
        """
        try:
            self.backend.reject(name)
        except self.backend.failures as error:
            if isinstance(reason, StoreUnreadable):
                raise
            self.counts.add(errors=1)
            log("mmcache could not take %s out of %s: %s", name.hex(), self.name, self.backend.recover(error))

    def _fill(self, source: Source, checker: Checker, reserve: Callable[[], memoryview | None], until: float) -> bool:
        first = bytearray(min(source.num_bytes, max(checker.num_head_bytes, _SEEN_BYTES)))
        source.read_into(0, memoryview(first), until)
        checker.begin(first, source.num_bytes)
        if (buffer := reserve()) is None:
            self.counts.add(dropped=1)
            return False
        for start in range(0, len(buffer), PIECE_BYTES):
            if time.monotonic() > until:
                raise DeadlineExceeded
            piece = buffer[start : start + PIECE_BYTES]
            source.read_into(checker.num_head_bytes + start, piece, until)
            checker.add(piece)
        checker.end()
        return True

    def _put(self, key: bytes, content: Callable[[], list[Buffer]]) -> int:
        """Bytes that were written; 0 where the content was there already."""
        name = self.codec.name(key)
        if self.backend.touch(name):
            return 0
        parts = content()
        content_bytes = sum(map(len, parts))
        entry_bytes = self.codec.num_bytes(content_bytes)
        self._note(self.backend.put(name, self.codec.encrypt(name, parts, content_bytes), entry_bytes))
        return entry_bytes

    def _get(self, key: bytes) -> Value | None:
        name = self.codec.name(key)
        content, written_s = None, 0.0
        try:
            with self.backend.open(name) as entry:
                if entry is None:
                    return None
                written_s = entry.written_s
                if entry.num_bytes > self._most_value_bytes:
                    raise StoreCorrupt("longer than a value can be")
                content = self._value_in(name, entry)
                if content is None and not entry.is_current():
                    return None  # replaced or removed meanwhile: nothing is known of what lies there now
        except Busy:
            return None
        except DeadlineExceeded:
            raise TimeoutError("a value took too long") from None  # so the next request does not wait, too
        except StoreCorrupt:
            pass
        if content is None:  # whoever puts this key next writes over it
            self.counts.add(**{self.kind.rejected: 1})
            return None
        return Value(content, written_s)

    def _value_in(self, name: bytes, entry: OpenEntry) -> bytes | None:
        """The value that an entry holds; None where it is no whole one."""
        try:
            if isinstance(entry, BytesEntry):
                framed = entry.content
            else:
                framed = bytearray(entry.num_bytes)
                entry.read_into(0, memoryview(framed), time.monotonic() + GET_S)
            return unframe(name, self.codec.decrypt_bytes(name, framed))
        except StoreCorrupt:
            return None

    def _put_values(self, named: Mapping[bytes, bytes]) -> Usage:
        entries = {name: self.codec.encrypt_bytes(name, frame(name, value)) for name, value in named.items()}
        return self.backend.put_many(entries)

    def _tidy(self) -> None:
        with suppress(Busy):  # others work on it: the next time
            self._note(self.backend.sweep())

    def _note(self, usage: Usage) -> None:
        self.counts.add(evictions=usage.num_evicted)
        if usage.held_bytes is not None:
            self.counts.hold(usage.held_bytes, self.backend.budget_bytes)


def pieces(content: memoryview) -> Iterable[memoryview]:
    """Content in parts of PIECE_BYTES, as `put` takes it."""
    return (content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES))
