# SPDX-License-Identifier: Apache-2.0
"""What the tiers that outlive the process have in common: packages read into given memory, every byte checked.

Engine process: `load` runs in reader threads, several at once, `save` in the tier's writer thread. Whatever goes wrong
is a miss, or a package that is not kept: it is counted, and the tier is left alone for a while. Neither ever raises,
and neither holds a lock of this process while it waits for a disk or a network.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from vllm_mmcache.base.errors import StoreCorrupt
from vllm_mmcache.base.lru import Size
from vllm_mmcache.components.features.counters import Counters
from vllm_mmcache.components.features.identity import Identity
from vllm_mmcache.components.features.package import Buffer, Check, Shape, head
from vllm_mmcache.storage.breaker import Breaker
from vllm_mmcache.storage.deadline import DeadlineExceeded
from vllm_mmcache.storage.encryption import PLAIN, PlainCodec, Source

logger = logging.getLogger("vllm.mmcache")

PIECE_BYTES = 4 * 1024**2
"""Features come and go in pieces of this size: between two of them a load looks at the time."""
HUNG_S = 1.0
"""A load that is still on its way so long after it should have given up hangs."""
# The head of another package, to say what it is; ours is seldom longer.
_SEEN_BYTES = 4096


class LastingTier(ABC):
    """A tier of packages as bytes. A subclass reads, writes and rejects; this class checks, counts and gives up."""

    name: str
    max_bytes: int
    """Of one package; a larger one is not kept."""
    failures: tuple[type[Exception], ...]
    """What reading and writing may raise when the tier can't serve."""
    ttl_s: int = 0
    """Seconds that a package is kept without use; 0 for ever."""

    def __init__(self, reading: Breaker, writing: Breaker, codec: PlainCodec = PLAIN) -> None:
        self.counters = Counters(self.name)
        self._codec = codec
        self._reading = reading
        self._writing = writing
        self._loads: dict[object, float] = {}  # on their way: when each should give up

    def size(self) -> Size:
        """What the tier holds, as this process last saw, and what it may hold; nothing where that is a server's."""
        return Size()

    def resting(self) -> bool:
        """Whether reading is left alone now: after a failure, and while a load hangs, so that no other one does."""
        hung = time.monotonic() - HUNG_S
        return self._reading.resting() or any(until < hung for until in list(self._loads.values()))

    def load(self, identity: Identity, shape: Shape, reserve: Callable[[], memoryview | None], until: float) -> bool:
        """Fill the memory that `reserve` gives with the features of exactly this identity; whether it did.

        reserve: called at most once, when there is a package that fits; gives writable bytes, `shape.num_bytes` of
        them, or None where there is no room (counted as dropped). After False they hold anything.
        until: the time by time.monotonic() when it gives up. Never raises.
        """
        filled = False
        start = time.perf_counter()
        if shape.num_bytes <= self.max_bytes and time.monotonic() < until and not self.resting():
            load = object()
            self._loads[load] = until
            try:
                filled = self._load(identity, shape, reserve, until)
            except Exception:  # a bug of ours must not reach a request
                self.counters.add(errors=1)
                logger.exception("mmcache could not load a package; serving goes on without it")
            finally:
                del self._loads[load]
        self.counters.add(
            hits=filled,
            misses=not filled,
            read_bytes=shape.num_bytes if filled else 0,
            load_s=time.perf_counter() - start,
        )
        return filled

    def save(self, identity: Identity, shape: Shape, features: memoryview) -> bool:
        """Keep these features, `shape.num_bytes` bytes; whether they are kept, now or since before. Never raises."""
        if shape.num_bytes > self.max_bytes or self._writing.resting():
            self.counters.add(dropped=1)
            return False
        start = time.perf_counter()
        try:
            written = 0
            name = name_of(identity, self._codec)
            if not self._renew(name):
                parts: list[Buffer] = [head(identity, shape, features), *_pieces(features)]
                content_bytes = sum(map(len, parts))
                written = self._codec.num_bytes(content_bytes)
                self._write(name, self._codec.parts(bytes.fromhex(name), parts, content_bytes), written)
        except self.failures as error:
            self._fail(self._writing, error)
            return False
        except Exception:  # a bug of ours must not end the writer
            self.counters.add(errors=1)
            logger.exception("mmcache could not save a package; serving goes on without it")
            return False
        self._writing.worked()
        self.counters.add(saved=written > 0, saved_bytes=written, save_s=time.perf_counter() - start)
        return True

    def tidy(self) -> None:
        """Remove what is over, where that does not happen by itself. Never raises."""
        if self._writing.resting():
            return
        try:
            self._tidy()
        except self.failures as error:
            self._fail(self._writing, error)
        except Exception:  # a bug of ours must not end the writer
            self.counters.add(errors=1)
            logger.exception("mmcache could not tidy %s; serving goes on", self.name)

    def _load(self, identity: Identity, shape: Shape, reserve: Callable[[], memoryview | None], until: float) -> bool:
        name = name_of(identity, self._codec)
        try:
            try:
                with self._open(name) as entry:
                    source = entry and self._codec.opened(entry, bytes.fromhex(name))
                    filled = source is not None and self._fill(source, Check(identity, shape), reserve, until)
                if filled:  # only now, since the source may have had a connection of its own
                    self._use(name)
            except StoreCorrupt as error:
                log = logger.debug if self.counters.snapshot()["set_aside"] else logger.warning
                log("mmcache %s set aside %s: %s (further ones at log level debug)", self.name, name, error)
                self.counters.add(set_aside=1)
                self._reject(name)
                filled = False
            self._reading.worked()
            return filled
        except DeadlineExceeded:
            self.counters.add(errors=1)
        except self.failures as error:
            self._fail(self._reading, error)
        return False

    def _fill(self, source: Source, check: Check, reserve: Callable[[], memoryview | None], until: float) -> bool:
        try:
            first = bytearray(min(source.num_bytes, max(check.num_head_bytes, _SEEN_BYTES)))
            source.read_into(0, memoryview(first), until)
            check.begin(first, source.num_bytes)
            if (buffer := reserve()) is None:
                self.counters.add(dropped=1)
                return False
            for start in range(0, len(buffer), PIECE_BYTES):
                if time.monotonic() > until:
                    raise DeadlineExceeded
                piece = buffer[start : start + PIECE_BYTES]
                source.read_into(check.num_head_bytes + start, piece, until)
                check.add(piece)
            check.end()
        except StoreCorrupt:
            if source.is_current():
                raise
            return False  # replaced or removed meanwhile: nothing is known of what lies there now
        return True

    def _fail(self, breaker: Breaker, error: object) -> None:
        self.counters.add(errors=1)
        breaker.failed(error)

    def _use(self, name: str) -> None:  # noqa: B027
        """A package was read: it lives for another `ttl_s`, where opening it does not say so. Raises nothing."""

    def _tidy(self) -> None:  # noqa: B027
        """As `tidy`. Raises: one of `failures`."""

    @abstractmethod
    def _open(self, name: str) -> AbstractContextManager[Source | None]:
        """The entry `name`; None for a miss. Raises: StoreCorrupt, or one of `failures`.

        Reading the entry raises the same, and DeadlineExceeded where that took longer than `until`.
        """

    @abstractmethod
    def _renew(self, name: str) -> bool:
        """Whether there is a package `name`; if so, it is now the most recently used. Raises: one of `failures`."""

    @abstractmethod
    def _write(self, name: str, parts: Iterable[Buffer], num_bytes: int) -> None:
        """Put a package, parts that follow each other, under `name`, as a whole or not at all.

        Each part is valid until the next one is taken; num_bytes is of all parts. Raises: one of `failures`.
        """

    @abstractmethod
    def _reject(self, name: str) -> None:
        """Take what lies under `name` out of service. Raises: one of `failures`."""


def name_of(identity: Identity, codec: PlainCodec) -> str:
    """What a package of that identity is called in tiers with that codec, 64 hex digits."""
    return codec.name(bytes.fromhex(identity.key)).hex()


def _pieces(features: memoryview) -> list[memoryview]:
    return [features[start : start + PIECE_BYTES] for start in range(0, len(features), PIECE_BYTES)]
