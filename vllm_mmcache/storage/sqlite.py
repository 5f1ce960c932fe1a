# SPDX-License-Identifier: Apache-2.0
"""Small entries in one SQLite file of a directory, which several processes use and a restart keeps. See sqlite_file.py.

The budget counts the pages in use. The entry that was written longest ago is removed first. An entry that is used is
put again from time to time by whoever uses it, so reads write nothing. Any process, any thread.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from vllm_mmcache.base.errors import StoreUnusable
from vllm_mmcache.storage import sqlite_file
from vllm_mmcache.storage.backend import Backend, Buffer, Busy, BytesEntry, EntryInfo, Usage
from vllm_mmcache.storage.directories import is_ours
from vllm_mmcache.storage.files import DISK_REST_S, SLACK
from vllm_mmcache.storage.frame import MAX_VALUE_BYTES
from vllm_mmcache.storage.kind import Kind
from vllm_mmcache.storage.sqlite_file import Database

READ_WAIT_S = 0.05
WRITE_WAIT_S = 5.0
MAX_ENTRY_BYTES = 2 * MAX_VALUE_BYTES
"""An entry that is longer can't be ours, framed and encrypted, and is not read."""
EVICTED_AT_ONCE = 100  # rows in one transaction
VACUUMED_AT_ONCE = 256  # pages in one transaction
ROW_BYTES = 128  # beside its frame: key, time, and their places in two indices

# Of every row, whatever somebody has put into it.
_FRAME = f"iif(typeof(frame) = 'blob' AND length(frame) <= {MAX_ENTRY_BYTES}, frame, x'')"
_GET = f"SELECT {_FRAME}, written_s FROM records WHERE key = ?"
_PUT = (
    "INSERT INTO records VALUES (?, ?, ?) ON CONFLICT(key) DO UPDATE SET "
    "frame = excluded.frame, written_s = excluded.written_s"
)

T = TypeVar("T")


class SqliteBackend(Backend):
    """The entries of one kind below the directory `place`, up to `budget_bytes` of pages. Several threads may read.

    Units: what was put longer than `ttl_s` ago goes with the next sweep; 0 for never.
    """

    tier = "disk"
    failures = (OSError, sqlite3.Error, StoreUnusable)
    rest_s = DISK_REST_S
    remedy = "try again, or `mmcache store clear`"
    max_bytes = MAX_VALUE_BYTES

    def __init__(self, place: str | Path, kind: Kind, budget_bytes: int, *, ttl_s: int = 0) -> None:
        self.where = str(place)
        self.folder = Path(place).absolute() / kind.name
        self.budget_bytes: int = budget_bytes
        self.ttl_s = ttl_s
        self._budget_setting = kind.disk_budget
        self._reading_from = Database(self.folder, READ_WAIT_S, makes=False)
        self._writing_to = Database(self.folder, WRITE_WAIT_S, makes=True)

    def open(self, name: bytes) -> AbstractContextManager[BytesEntry | None]:
        """As Backend says; what lies there is read as a whole. Raises: Busy, too."""
        found = self._reading_from.run(lambda connection: connection.execute(_GET, (name,)).fetchone())
        if found is None:
            return nullcontext()
        content, written_s = found
        return nullcontext(
            BytesEntry(content if isinstance(content, bytes) else b"", written_s if isinstance(written_s, int) else 0.0)
        )

    def touch(self, name: bytes) -> bool:
        """As Backend says."""

        def work(connection: sqlite3.Connection) -> bool:
            changed = connection.execute("UPDATE records SET written_s = ? WHERE key = ?", (int(time.time()), name))
            return changed.rowcount > 0

        return bool(self._run(work))

    def put(self, name: bytes, parts: Iterable[Buffer], num_bytes: int) -> Usage:
        """As Backend says; an entry that is there is replaced."""
        return self.put_many({name: b"".join(parts)})

    def put_many(self, entries: Mapping[bytes, bytes]) -> Usage:
        """As Backend says; all of them or none. Raises: StoreUnusable where the budget has no room."""
        now = int(time.time())
        num_bytes = sum(len(content) + ROW_BYTES for content in entries.values())

        def work(connection: sqlite3.Connection) -> Usage:
            num_evicted = self._make_room(connection, num_bytes)
            if held_bytes(connection) + num_bytes > self.budget_bytes:
                raise StoreUnusable(
                    f"{self._budget_setting} = {self.budget_bytes} has no room for {num_bytes}: raise it"
                )
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(_PUT, ((name, content, now) for name, content in entries.items()))
            connection.execute("COMMIT")
            return Usage(held_bytes(connection), num_evicted)

        return self._writing_to.run(work) or Usage(0)

    def reject(self, name: bytes) -> None:
        """Remove the entry. Raises: one of `failures`."""
        self._run(lambda connection: connection.execute("DELETE FROM records WHERE key = ?", (name,)).rowcount)

    def sweep(self) -> Usage:
        """Remove what is over, evict until the budget holds, and give the pages back.

        Files that were set aside, and those of other versions of mmcache, go when nobody wrote to them for `ttl_s`.
        Raises: one of `failures`.
        """

        def work(connection: sqlite3.Connection) -> Usage:
            num_evicted = sum(removals(connection, int(over_s))) if self.ttl_s else 0
            num_evicted += self._make_room(connection, 0)
            while unused := pages(connection).unused:
                connection.execute(f"PRAGMA incremental_vacuum({VACUUMED_AT_ONCE})").fetchall()
                if pages(connection).unused >= unused:  # others have freed some meanwhile
                    break
            return Usage(held_bytes(connection), num_evicted)

        over_s = time.time() - self.ttl_s
        swept = self._run(work) or Usage()
        former = [*sorted(sqlite_file.names(self.folder))[:-1], *sqlite_file.names_of_others(self.folder)]
        for file in former if self.ttl_s else ():
            if sqlite_file.changed_s(self.folder / file) < over_s:
                sqlite_file.remove(self.folder / file)
        return swept

    def to_sweep(self) -> tuple[int, int]:
        """As Backend says, files of other versions left out. Pages may hold a little more than the entries' bytes."""

        def work(connection: sqlite3.Connection) -> tuple[int, int]:
            held, num, freed = held_bytes(connection), 0, 0
            limit = self.budget_bytes * (1 - SLACK if held > self.budget_bytes else 1)
            rows = f"SELECT written_s < ?, length({_FRAME}) FROM records ORDER BY written_s, rowid"
            for is_over, num_bytes in connection.execute(rows, (over_s,)):
                if held - freed <= limit and not (self.ttl_s and is_over):
                    break
                num, freed = num + 1, freed + (num_bytes or 0)
            return num, freed

        over_s = int(time.time() - self.ttl_s)
        return self._run(work) or (0, 0)

    def scan(self) -> Iterator[EntryInfo]:
        """As Backend says. Raises: one of `failures`."""
        rows = self._run(
            lambda connection: connection.execute(
                f"SELECT key, length({_FRAME}), written_s FROM records WHERE typeof(key) = 'blob'"
            ).fetchall()
        )
        for name, num_bytes, written_s in rows or ():
            yield EntryInfo(name, num_bytes, written_s if isinstance(written_s, int) else 0.0)

    def sizes(self) -> tuple[int, int]:
        """How many entries there are, and the bytes of the pages in use. Raises: one of `failures`."""

        def work(connection: sqlite3.Connection) -> tuple[int, int]:
            (num_entries,) = connection.execute("SELECT count(*) FROM records").fetchone()
            return num_entries, held_bytes(connection)

        return self._run(work) or (0, 0)

    def verify(self) -> str | None:
        """Have SQLite look at the whole file. Returns its name, if it was damaged and another one is begun."""

        def work(connection: sqlite3.Connection) -> None:
            (said,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if said != "ok":
                raise sqlite3.DatabaseError(said)

        file = sqlite_file.current(self.folder)
        self._run(work)
        return file if sqlite_file.current(self.folder) != file else None

    def is_there(self) -> bool:
        """Whether the kind's directory exists and can be trusted. Raises: StoreUnusable where it can't be."""
        return is_ours(self.folder)

    def clear(self) -> int:
        """Remove all files, also under servers that use them, and the folder, if it holds nothing else then."""
        self.close()  # a file that is open takes its room still
        removed = sum(sqlite_file.remove(path) for path in self._databases())
        with suppress(OSError):
            self.folder.rmdir()
        return removed

    def to_clear(self) -> tuple[int, int]:
        """As Backend says: files, those of other formats among them. Raises: OSError, StoreUnusable."""
        self.close()  # takes away the files that SQLite has beside a database
        sizes = [size for path in self._databases() for size in sqlite_file.sizes(path)]
        return len(sizes), sum(sizes)

    def _databases(self) -> list[Path]:
        names = [*sqlite_file.names(self.folder), *sqlite_file.names_of_others(self.folder)]
        return [self.folder / name for name in names]

    def close(self) -> None:
        """Close both connections; one that a thread uses for longer than its wait stays open."""
        for one in (self._reading_from, self._writing_to):
            with suppress(Busy):
                one.close()

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        return self._writing_to.run(work) if sqlite_file.current(self.folder) is not None else None

    def _make_room(self, connection: sqlite3.Connection, num_bytes: int) -> int:
        """Evict what was written longest ago, if there is no room for so much; returns how many entries went."""
        evicted = 0
        limit = self.budget_bytes - num_bytes
        if held_bytes(connection) <= limit:
            return 0
        for num_rows in removals(connection):
            evicted += num_rows
            if held_bytes(connection) <= limit - SLACK * self.budget_bytes:
                break
        return evicted


def removals(connection: sqlite3.Connection, before_s: int = 2**62) -> Iterator[int]:
    """Remove entries that were written before, those of longest ago first, some at a time; yields their number.

    Units: before_s, as written_s in the table, in seconds since the epoch.
    """
    oldest = f"SELECT rowid FROM records WHERE written_s < ? ORDER BY written_s, rowid LIMIT {EVICTED_AT_ONCE}"
    while num_rows := connection.execute(f"DELETE FROM records WHERE rowid IN ({oldest})", (before_s,)).rowcount:
        yield num_rows


class Pages(NamedTuple):
    """What a file is made of: how many pages, how many of them hold nothing, and the bytes of each."""

    num: int
    unused: int
    num_bytes: int


def pages(connection: sqlite3.Connection) -> Pages:
    """The pages of the file now."""
    names = ("page_count", "freelist_count", "page_size")
    return Pages(*(int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in names))


def held_bytes(connection: sqlite3.Connection) -> int:
    """Bytes of the pages in use."""
    found = pages(connection)
    return (found.num - found.unused) * found.num_bytes
