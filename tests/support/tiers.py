# SPDX-License-Identifier: Apache-2.0
"""What the tests of the store put below its RAM: a tier in memory that hangs, fails and is left alone as told."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.engine.ram_tier import RamTier, Slot
from vllm_mmcache.components.features.identity import Identity
from vllm_mmcache.components.features.package import Shape
from vllm_mmcache.components.features.tiers import FEATURES
from vllm_mmcache.storage.backend import Backend, Buffer, BytesEntry, EntryInfo, Usage
from vllm_mmcache.storage.breaker import CircuitBreaker
from vllm_mmcache.storage.encryption import PLAIN, PlainCodec
from vllm_mmcache.storage.kind import Kind
from vllm_mmcache.storage.record_store import RECORDS
from vllm_mmcache.storage.sqlite import SqliteBackend
from vllm_mmcache.storage.tier import Tier

LONG_S = 120
"""Of waiting for what must come, however busy the machine is."""


def within(seconds: float, seen: Callable[[], object]) -> bool:
    """Wait until it is so; False where it is not so after that time."""
    until = time.monotonic() + seconds
    while not seen() and time.monotonic() < until:
        time.sleep(0.002)
    return bool(seen())


class Gate:
    """Open, until it is shut; whoever comes then is counted, and waits."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._come = threading.Semaphore(0)

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def has_come(self) -> bool:
        """Wait until one more has come."""
        return self._come.acquire(timeout=LONG_S)

    def pass_through(self) -> None:
        self._come.release()
        assert self._open.wait(LONG_S)


class MemoryBackend(Backend):
    """Keeps entries in a dict, in the order of writing; reading and writing wait at gates, and raise what is set."""

    failures: tuple[type[Exception], ...] = (OSError,)
    rest_s = 1e6, 1e6
    remedy = "wait"

    def __init__(self, name: str = "memory", max_bytes: int = 1 << 30) -> None:
        self.tier = self.where = name
        self.max_bytes = max_bytes
        self.entries: dict[bytes, bytes] = {}
        self.reading, self.writing = Gate(), Gate()
        self.broken: type[Exception] | None = None
        """What reading and writing raise."""

    @contextmanager
    def open(self, name: bytes) -> Iterator[BytesEntry | None]:
        self.reading.pass_through()
        if self.broken is not None:
            raise self.broken("broken")
        content = self.entries.get(name)
        yield None if content is None else BytesEntry(content)

    def touch(self, name: bytes) -> bool:
        return name in self.entries

    def put(self, name: bytes, parts: Iterable[Buffer], num_bytes: int) -> Usage:
        self.writing.pass_through()
        if self.broken is not None:
            raise self.broken("broken")
        self.entries[name] = b"".join(map(bytes, parts))
        return Usage()

    def put_many(self, entries: Mapping[bytes, bytes]) -> Usage:
        for name, content in entries.items():
            self.put(name, [content], len(content))
        return Usage()

    def reject(self, name: bytes) -> None:
        self.entries.pop(name, None)

    def scan(self) -> Iterator[EntryInfo]:
        return (EntryInfo(name, len(content)) for name, content in list(self.entries.items()))

    def clear(self) -> int:
        num_entries = len(self.entries)
        self.entries.clear()
        return num_entries


class MemoryTier(Tier):
    """A tier over a MemoryBackend; `packages` has what was written by name in base 16, in the order of writing."""

    def __init__(self, name: str = "memory", max_bytes: int = 1 << 30, kind: Kind = FEATURES) -> None:
        self.memory = MemoryBackend(name, max_bytes)
        super().__init__(kind, self.memory)
        self.reading, self.writing = self.memory.reading, self.memory.writing

    @property
    def packages(self) -> dict[str, bytes]:
        return {name.hex(): content for name, content in self.memory.entries.items()}

    @property
    def broken(self) -> type[Exception] | None:
        """What reading and writing raise."""
        return self.memory.broken

    @broken.setter
    def broken(self, kind: type[Exception] | None) -> None:
        self.memory.broken = kind

    def open_breakers(self) -> None:
        """Take nothing, until `close_breakers`."""
        self._writing.record_failure(OSError("off"))
        self._reading.record_failure(OSError("off"))

    def close_breakers(self) -> None:
        self._reading = CircuitBreaker(f"{self.name} (reading)", 1e6, 1e6)
        self._writing = CircuitBreaker(f"{self.name} (writing)", 1e6, 1e6)


def record_tier(place: str | Path, budget_bytes: int = 1 << 20, *, ttl_s: int = 0, codec: PlainCodec = PLAIN) -> Tier:
    """A tier of records in a directory."""
    return Tier(RECORDS, SqliteBackend(place, RECORDS, budget_bytes, ttl_s=ttl_s), codec)


def fill(ram: RamTier, arena: Arena, identity: Identity, shape: Shape, features: bytes | memoryview) -> Slot:
    """Put features into RAM; they are held."""
    slot = ram.reserve(identity.key, shape.num_bytes)
    assert slot is not None
    arena.buffer(slot.offset, shape.num_bytes)[:] = features
    ram.publish(slot)
    return slot
