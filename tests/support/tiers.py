# SPDX-License-Identifier: Apache-2.0
"""What the tests of the store put below its RAM: a lasting tier in memory that hangs, fails and rests as told."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.engine.ram_tier import RamTier, Slot
from vllm_mmcache.components.features.identity import Identity
from vllm_mmcache.components.features.lasting import LastingTier
from vllm_mmcache.components.features.package import Shape
from vllm_mmcache.storage.breaker import Breaker

LONG_S = 120
"""Of waiting for what must come, however busy the machine is."""


def within(seconds: float, seen: Callable[[], object]) -> bool:
    """Wait until it is so; False where it is not so after that time."""
    until = time.monotonic() + seconds
    while not seen() and time.monotonic() < until:
        time.sleep(0.002)
    return bool(seen())


class Bytes:
    """A package that lies in memory."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed
        self.num_bytes = len(packed)

    def read_into(self, offset: int, buffer: memoryview, until: float) -> None:
        buffer[:] = self._packed[offset : offset + len(buffer)]

    def is_current(self) -> bool:
        return True


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


class MemoryTier(LastingTier):
    """Keeps packages in a dict; `packages` has them in the order of writing."""

    failures = (OSError,)

    def __init__(self, name: str = "memory", max_bytes: int = 1 << 30) -> None:
        self.name = name
        self.max_bytes = max_bytes
        super().__init__(*_breakers(name))
        self.packages: dict[str, bytes] = {}
        self.reading, self.writing = Gate(), Gate()
        self.broken: type[Exception] | None = None
        """What reading and writing raise."""

    def rest(self) -> None:
        """Take nothing, until `wake`."""
        self._writing.failed(OSError("resting"))
        self._reading.failed(OSError("resting"))

    def wake(self) -> None:
        self._reading, self._writing = _breakers(self.name)

    @contextmanager
    def _open(self, name: str) -> Iterator[Bytes | None]:
        self.reading.pass_through()
        if self.broken is not None:
            raise self.broken("broken")
        packed = self.packages.get(name)
        yield None if packed is None else Bytes(packed)

    def _renew(self, name: str) -> bool:
        return name in self.packages

    def _write(self, name: str, parts: Iterable[bytes | bytearray | memoryview], num_bytes: int) -> None:
        self.writing.pass_through()
        if self.broken is not None:
            raise self.broken("broken")
        self.packages[name] = b"".join(map(bytes, parts))

    def _reject(self, name: str) -> None:
        del self.packages[name]


def _breakers(name: str) -> tuple[Breaker, Breaker]:
    return Breaker(f"{name} (reading)", 1e6, 1e6), Breaker(f"{name} (writing)", 1e6, 1e6)


def fill(ram: RamTier, arena: Arena, identity: Identity, shape: Shape, features: bytes | memoryview) -> Slot:
    """Put features into RAM; they are held."""
    slot = ram.reserve(identity.key, shape.num_bytes)
    assert slot is not None
    arena.buffer(slot.offset, shape.num_bytes)[:] = features
    ram.publish(slot)
    return slot
