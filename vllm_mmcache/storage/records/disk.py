# SPDX-License-Identifier: Apache-2.0
"""Records in the store's directory, which several processes use and a restart keeps. See database.py for the file.

The budget counts the pages in use. The record that was written longest ago is removed first. A record that is used is
written again from time to time (RENEW_S), so most reads write nothing.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from vllm_mmcache.base.errors import StoreUnusable
from vllm_mmcache.metrics import counters
from vllm_mmcache.storage.encryption import PLAIN, PlainCodec
from vllm_mmcache.storage.frame import HEAD_BYTES, MAX_VALUE_BYTES
from vllm_mmcache.storage.records import database
from vllm_mmcache.storage.records.database import Busy, Database
from vllm_mmcache.storage.records.place import Place, value_in

FOLDER = "records"
FIRST_REST_S = 30.0
LONGEST_REST_S = 600.0
READ_WAIT_S = 0.05
WRITE_WAIT_S = 5.0
# An eviction goes below the budget by this part, so that not every write needs one.
SLACK = 0.1
EVICTED_AT_ONCE = 100  # rows in one transaction
VACUUMED_AT_ONCE = 256  # pages in one transaction
ROW_BYTES = 128  # beside its frame: key, time, and their places in two indices

T = TypeVar("T")


class DiskPlace(Place):
    """The records below the store's directory `place`, up to `budget_bytes` of pages. Several threads may read.

    Units: what was written, or written again, longer than `ttl_s` ago goes with the next sweep; 0 for never.
    """

    name = "disk"
    failures = (OSError, sqlite3.Error, StoreUnusable)

    def __init__(
        self,
        place: str | Path,
        budget_bytes: int,
        *,
        ttl_s: int = 0,
        rest_s: float = FIRST_REST_S,
        codec: PlainCodec = PLAIN,
    ) -> None:
        self.folder = Path(place).absolute() / FOLDER
        super().__init__(str(place), rest_s, LONGEST_REST_S, codec)
        self._budget_bytes = budget_bytes
        # One that is longer than ours can be is not read.
        most_bytes = codec.num_bytes(HEAD_BYTES + MAX_VALUE_BYTES)
        self._frame = f"iif(typeof(frame) = 'blob' AND length(frame) <= {most_bytes}, frame, x'')"
        self.ttl_s = ttl_s
        self._reading_from = Database(self.folder, READ_WAIT_S, makes=False)
        self._writing_to = Database(self.folder, WRITE_WAIT_S, makes=True)

    def sweep(self) -> tuple[int, int]:
        """Remove what is over, evict until the budget holds, and give the pages back.

        Files that were set aside, and those of other versions of mmcache, go when nobody wrote to them for `ttl_s`.
        Returns bytes in use, records evicted.

        Raises: one of `failures`, or Busy.
        """

        def work(connection: sqlite3.Connection) -> tuple[int, int]:
            evicted = sum(removals(connection, int(over_s))) if self.ttl_s else 0
            evicted += self._make_room(connection, 0)
            while unused := pages(connection).unused:
                connection.execute(f"PRAGMA incremental_vacuum({VACUUMED_AT_ONCE})").fetchall()
                if pages(connection).unused >= unused:  # others have freed some meanwhile
                    break
            return held_bytes(connection), evicted

        over_s = time.time() - self.ttl_s
        swept = self._run(work) or (0, 0)
        former = [*sorted(database.names(self.folder))[:-1], *database.names_of_others(self.folder)]
        for name in former if self.ttl_s else ():
            if database.changed_s(self.folder / name) < over_s:
                database.remove(self.folder / name)
        return swept

    def check(self) -> tuple[int, int, str | None]:
        """How many records are whole, how many were not and are removed, and the file, if it had to be set aside.

        What another key has encrypted is left alone, and not counted. Raises: as `sweep`.
        """

        def work(connection: sqlite3.Connection) -> tuple[int, int]:
            (said,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            if said != "ok":
                raise sqlite3.DatabaseError(said)
            num_good, bad = 0, []
            for row, key, framed in connection.execute(f"SELECT rowid, key, {self._frame} FROM records"):
                if self._is_whole(key, framed):
                    num_good += 1
                elif not (isinstance(framed, bytes) and self._codec.has_other_key(framed)):
                    bad.append((row,))
            connection.executemany("DELETE FROM records WHERE rowid = ?", bad)
            return num_good, len(bad)

        file = database.current(self.folder)
        num_good, num_bad = self._run(work) or (0, 0)
        return num_good, num_bad, file if database.current(self.folder) != file else None

    def sizes(self) -> tuple[int, int]:
        """How many records there are, and the bytes in use. Raises: as `sweep`."""

        def work(connection: sqlite3.Connection) -> tuple[int, int]:
            (num_records,) = connection.execute("SELECT count(*) FROM records").fetchone()
            return num_records, held_bytes(connection)

        return self._run(work) or (0, 0)

    def remove(self) -> int:
        """Remove all files, also under servers that use them, and the folder, if it holds nothing else then.

        Returns the number of files. Raises: OSError, StoreUnusable.
        """
        self.close()  # a file that is open takes its room still
        names = [*database.names(self.folder), *database.names_of_others(self.folder)]
        removed = sum(database.remove(self.folder / name) for name in names)
        with suppress(OSError):
            self.folder.rmdir()
        return removed

    def clear(self) -> None:
        """Remove all files, also under servers that use them; what can't be removed stays."""
        with suppress(OSError, StoreUnusable):
            self.remove()

    def _tidy(self) -> None:
        if self.ttl_s:
            with suppress(Busy):  # others work on it: the next time
                self.sweep()

    def close(self) -> None:
        """Close both connections; one that a thread uses for longer than its wait stays open."""
        for one in (self._reading_from, self._writing_to):
            with suppress(Busy):
                one.close()

    def _is_whole(self, name: object, entry: object) -> bool:
        return isinstance(name, bytes) and isinstance(entry, bytes) and value_in(name, entry, self._codec) is not None

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        return self._writing_to.run(work) if database.current(self.folder) is not None else None

    def _load(self, key: bytes) -> tuple[bytes, float] | None:
        def work(connection: sqlite3.Connection) -> tuple[object, object] | None:
            found: tuple[object, object] | None = connection.execute(
                f"SELECT {self._frame}, written_s FROM records WHERE key = ?", (key,)
            ).fetchone()
            return found

        try:
            found = self._reading_from.run(work)
        except Busy:  # it may be well the next time
            return None
        if found is None:
            return None
        framed, written_s = found
        return framed if isinstance(framed, bytes) else b"", written_s if isinstance(written_s, int) else 0

    def _save(self, frames: Mapping[bytes, bytes]) -> int:
        now = int(time.time())
        num_bytes = sum(len(framed) + ROW_BYTES for framed in frames.values())

        def work(connection: sqlite3.Connection) -> int:
            self._make_room(connection, num_bytes)
            if held_bytes(connection) + num_bytes > self._budget_bytes:
                raise StoreUnusable(f"records_disk_bytes = {self._budget_bytes} has no room for {num_bytes}: raise it")
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(
                "INSERT INTO records VALUES (?, ?, ?) ON CONFLICT(key) DO UPDATE SET "
                "frame = excluded.frame, written_s = excluded.written_s",
                ((key, framed, now) for key, framed in frames.items()),
            )
            connection.execute("COMMIT")
            return held_bytes(connection)

        try:
            counters.RECORD_DISK_BYTES.show(self._writing_to.run(work) or 0)
            counters.RECORD_DISK_BUDGET_BYTES.show(self._budget_bytes)
        except Busy as error:
            raise StoreUnusable(str(error)) from None
        return len(frames)

    def _make_room(self, connection: sqlite3.Connection, num_bytes: int) -> int:
        """Evict what was written longest ago, if there is no room for so much; returns how many records went."""
        evicted = 0
        limit = self._budget_bytes - num_bytes
        if held_bytes(connection) <= limit:
            return 0
        for num_rows in removals(connection):
            evicted += num_rows
            if held_bytes(connection) <= limit - SLACK * self._budget_bytes:
                break
        return evicted


def removals(connection: sqlite3.Connection, before_s: int = 2**62) -> Iterator[int]:
    """Remove records that were written before, those of longest ago first, some at a time; yields their number.

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
