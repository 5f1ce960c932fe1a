# SPDX-License-Identifier: Apache-2.0
"""What a backend is: it keeps entries, bytes under names, in a directory, a database or a server.

A backend knows neither images nor tenants, keys or checksums: a tier (tier.py) encrypts what it is given, checks what
it gives back, counts, and leaves it alone after a failure. So a backend may raise, be slow, and give back anything.
"Add a backend" in CONTRIBUTING.md says how to write one. Any process.

A name is 32 bytes, made from a key by the codec: no text that a client chose ever reaches a path or a command.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from vllm_mmcache.base.errors import StoreCorrupt, StoreUnusable

Buffer = bytes | bytearray | memoryview
"""Bytes; a memoryview of one dimension, whose items are bytes."""


class DeadlineExceeded(Exception):
    """A read was not complete when its time was over."""


class Busy(StoreUnusable):
    """Others use the backend for too long.

    A read that raises it is a miss, and no failure: it may be well the next time. So it is with `sweep`, which is tried
    again later; raised by a method that writes it is a failure as any other.
    """


class PartUnavailable(Exception):
    """One part of the backend, such as a node of a cluster, does not serve; it is left alone, and the others serve."""

    def __init__(self, message: str, *, is_new: bool) -> None:
        super().__init__(message)
        self.is_new = is_new
        """Whether it was asked; False while it is left alone."""


class Source(Protocol):
    """Bytes that can be read from any offset."""

    num_bytes: int

    def read_into(self, offset: int, buffer: memoryview, until: float) -> None:
        """Fill `buffer` with the bytes from `offset` on.

        until: the time, by time.monotonic(), at which a read that waits gives up. Raises: StoreCorrupt where there are
        fewer bytes; StoreUnreadable where the fault may be this entry's alone; DeadlineExceeded; one of the backend's
        `failures`.
        """


class OpenEntry(Source, Protocol):
    """An entry that is open for reading, by one thread."""

    written_s: float
    """When it was last written or used, in seconds since the epoch; 0 where the backend does not know."""

    def is_current(self) -> bool:
        """False where the bytes that were read may be those of several entries, since this one was replaced meanwhile.

        Then nothing bad is known of what lies there now. Where all bytes are in memory that can't be. Raises: as
        `read_into`.
        """

    def mark_used(self) -> None:
        """It was used: it lives for another `ttl_s`, and is the last to be evicted. Raises nothing.

        A backend of small entries may leave this out: whoever uses a small value puts it again from time to time.
        """


class BytesEntry:
    """An entry whose bytes are in memory already."""

    def __init__(self, content: Buffer, written_s: float = 0.0) -> None:
        self.content = content
        self.num_bytes = len(content)
        self.written_s = written_s

    def read_into(self, offset: int, buffer: memoryview, until: float = math.inf) -> None:
        """As Source says."""
        piece = memoryview(self.content)[offset : offset + len(buffer)]
        if len(piece) < len(buffer):
            raise StoreCorrupt(f"it ends at byte {self.num_bytes}")
        buffer[:] = piece

    def is_current(self) -> bool:
        """True: nobody can change bytes in memory."""
        return True

    def mark_used(self) -> None:
        """Does nothing."""


class EntryInfo(NamedTuple):
    """What a backend says of one entry without opening it. Units: used_s are seconds since the epoch, 0 if unknown."""

    name: bytes
    num_bytes: int
    used_s: float = 0.0


class Usage(NamedTuple):
    """What a change has left. Units: held_bytes are the bytes in use, None where that is a server's business."""

    held_bytes: int | None = None
    num_evicted: int = 0


class Backend(ABC):
    """Entries by name. Several threads use it at once; several processes, too, and machines where it is shared.

    `open`, what is done with an open entry, and `reject` run in threads for which a request may wait, and must not wait
    long; everything else runs in background threads and in the command line. No method is called in a step of the
    engine, and none may hold a lock of this process while it waits for a disk or a network.
    """

    tier: str
    """The tier's name in counts and metrics: `disk` or `remote`."""
    where: str
    """What log lines call the place, without passwords."""
    failures: tuple[type[Exception], ...]
    """What the methods may raise when the backend can't serve. Anything else is a bug, and is logged as one."""
    rest_s: tuple[float, float]
    """Seconds that it is left alone after a failure, and the most, since each further failure doubles them."""
    max_bytes: int
    """The most that the content of one entry may have. Checked by the tier before `put`, not before `put_many`."""
    ttl_s: int = 0
    """Seconds that an entry is kept without use; 0 for ever."""
    budget_bytes: int | None = None
    """What all entries together may take; None where that is a server's business."""
    remedy: str
    """What to do when it can't be used, for the command line."""
    is_shared: bool = False
    """Whether other machines use the entries: then one server that forgets its own leaves them."""

    @abstractmethod
    def open(self, name: bytes) -> AbstractContextManager[OpenEntry | None]:
        """The entry `name`; None for a miss. Raises: StoreCorrupt for what is no entry; one of `failures`."""

    @abstractmethod
    def touch(self, name: bytes) -> bool:
        """Whether there is an entry `name`, which is then marked as used. Raises: one of `failures`."""

    @abstractmethod
    def put(self, name: bytes, parts: Iterable[Buffer], num_bytes: int) -> Usage:
        """Keep an entry of exactly `num_bytes`, in parts that follow each other, as a whole or not at all.

        Each part is valid until the next one is taken; what the parts raise is raised. A reader finds what was there
        before, or all of it; so does one after a crash at any moment. An entry that is there may be left as it is: it
        has the same content. May evict others. Raises: one of `failures`.
        """

    @abstractmethod
    def put_many(self, entries: Mapping[bytes, bytes]) -> Usage:
        """Keep small entries by name, instead of older ones. Raises: one of `failures`; then some may be kept."""

    def groups(self, names: list[bytes]) -> list[list[bytes]]:
        """These names in groups, each for one `put_many`: if one can't be kept, the others can. Never waits."""
        return [names]

    @abstractmethod
    def reject(self, name: bytes) -> None:
        """Take the entry `name` out of service, which was found to be damaged; without such an entry nothing happens.

        Never waits for a writer. Afterwards neither `open`, `touch` nor `scan` knows it, until it is put again. Raises:
        one of `failures`.
        """

    def sweep(self) -> Usage:
        """Remove what was not used for `ttl_s`, and what is over the budget, where that does not happen by itself.

        Raises: one of `failures`.
        """
        return Usage()

    def to_sweep(self) -> tuple[int, int]:
        """About how many entries `sweep` would remove now, and their bytes. Raises: one of `failures`."""
        return 0, 0

    @abstractmethod
    def scan(self) -> Iterator[EntryInfo]:
        """Every entry of this version's format, once, in any order. Raises: one of `failures`."""

    def num_rejected(self) -> int:
        """How many rejected entries are kept for a look."""
        return 0

    def is_there(self) -> bool:
        """Whether there may be anything: False before the first entry was put. Raises: one of `failures`."""
        return True

    def sizes(self) -> tuple[int, int]:
        """How many entries there are, and the bytes in use, as in `Usage.held_bytes`. Raises: one of `failures`."""
        entries = list(self.scan())
        return len(entries), sum(entry.num_bytes for entry in entries)

    def verify(self) -> str | None:
        """Look at what holds the entries. Returns the name of what was damaged as a whole and is set aside, if it was.

        Raises: one of `failures`.
        """
        return None

    @abstractmethod
    def clear(self) -> int:
        """Remove everything of this kind, also what other processes use and what other versions wrote.

        Returns how many files or entries there were. Raises: one of `failures`.
        """

    def to_clear(self) -> tuple[int, int]:
        """How many files or entries `clear` would remove now, and their bytes. Raises: one of `failures`."""
        return self.sizes()

    def recover(self, error: Exception) -> str:
        """Called after each failure: let go of what it may have left behind. Returns the text for the log."""
        return str(error)

    def close(self) -> None:  # noqa: B027
        """Let go of files and connections. Raises nothing; what is used after this is opened anew."""
