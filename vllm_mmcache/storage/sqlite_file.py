# SPDX-License-Identifier: Apache-2.0
"""The SQLite file that holds small entries of one kind, and a connection that follows when the file is replaced.

    <store>/records/                           mode 0700, ours alone; the folder's name is the kind's
        records-v2-00000000-1b2c3d4e.sqlite    one table: key, frame, when it was written
        ...-journal                            SQLite's own

The file in use is the one of this FORMAT with the greatest name. If it is damaged and no database, a file with the
next number is begun, and all files but the last one before it are removed. No name is used twice, so a connection to a
removed file, of this or another process, can't touch the files of the next one. Each use of a connection first looks
for the greatest name, so a file that was removed (`mmcache store clear`) or replaced is closed at once. Files of other
formats belong to other versions of mmcache, which may be using them.

Several processes use a file at once, with a rollback journal. A write-ahead log would have its index in mapped memory,
and whoever shortens such a file ends every process that has it mapped. Readers wait while a transaction is written,
which takes as long as copying it to the system: nothing waits for the disk. So a crash of the system may cost the file.
"""

import functools
import logging
import math
import os
import re
import sqlite3
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from time import monotonic
from typing import TypeVar

from vllm_mmcache.storage.backend import Busy
from vllm_mmcache.storage.directories import is_ours

logger = logging.getLogger("vllm.mmcache")

FORMAT = 2
"""Of the file: raise it when the table or the way of using it changes. It is in the file's name, so that each version
of mmcache has files of its own in a store; what an entry means is in its key."""
HUNG_S = 1.0
"""Work that takes longer hangs: nobody waits for its connection any more."""
CACHE_KIB = 256

_OWN_FILES = ("-journal", "-wal", "-shm")  # of SQLite, beside a file of any format
_NO_DATABASE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR})
# Of a process that has forked: its connections must not be used here, nor closed.
_inherited: list[sqlite3.Connection] = []

T = TypeVar("T")


class Database:
    """One connection, for one thread at a time. Other threads wait for it while its work does not hang.

    wait_s: how long to wait at most for what other processes do with the file; and for the connection, if it is longer
    than HUNG_S. makes: whether to begin a file where there is none. If not, nothing is found there.
    """

    def __init__(self, folder: Path, wait_s: float, *, makes: bool) -> None:
        self._folder = folder
        self._wait_s = wait_s
        self._makes = makes
        self._lock = threading.Lock()
        self._begun = math.inf
        self._open: tuple[int, str, sqlite3.Connection] | None = None  # process, name of the file

    def run(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """What `work` returns; None where there is no file. A file that is no database is replaced by a new one.

        Raises: Busy; StoreUnusable for a folder or file that is not to be used; OSError and sqlite3.Error where the
        system refuses, or the new file is no database either.
        """
        hangs = monotonic() - self._begun > HUNG_S
        timeout = 0 if hangs else max(HUNG_S, self._wait_s)
        if not self._lock.acquire(timeout=timeout):
            raise Busy(f"{self._folder} was in use for {timeout:g} s")
        self._begun = monotonic()
        try:
            return self._tried(work, attempts=2)
        finally:
            self._begun = math.inf
            self._lock.release()

    def close(self) -> None:
        """Let go of the file. Raises: Busy."""
        if not self._lock.acquire(timeout=self._wait_s):
            raise Busy(f"{self._folder} is in use")
        try:
            self._let_go()
        finally:
            self._lock.release()

    def _tried(self, work: Callable[[sqlite3.Connection], T], attempts: int) -> T | None:
        name = None
        try:
            name = current(self._folder)
            connection = self._connected(name)
            return None if connection is None else work(connection)
        except sqlite3.Error as error:
            self._let_go()  # which also takes back what was begun
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise Busy(str(error)) from None
            if attempts == 1:
                raise
            if code in _NO_DATABASE and name is not None and current(self._folder) == name:
                made = begin(self._folder)
                logger.warning("mmcache set aside %s, and began %s: %s", self._folder / name, made, error)
            elif current(self._folder) == name:
                raise
            return self._tried(work, attempts - 1)

    def _connected(self, name: str | None) -> sqlite3.Connection | None:
        if self._open is not None:
            process, opened, connection = self._open
            if (process, opened) == (os.getpid(), name):
                return connection
            self._let_go()
        if name is None:
            if not self._makes:
                return None
            name = begin(self._folder)
        connection = connect(self._folder / name, self._wait_s)
        self._open = os.getpid(), name, connection
        if not self._makes:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0:  # begun by somebody, and without a table so far
                self._let_go()
                return None
            check_format(version)
        else:
            make_table(connection)
        return connection

    def _let_go(self) -> None:
        if self._open is not None:
            process, _, connection = self._open
            self._open = None
            if process == os.getpid():
                with suppress(sqlite3.Error):
                    connection.close()
            else:
                _inherited.append(connection)


def current(folder: Path) -> str | None:
    """The name of the file in use; None where there is none. Raises: OSError, StoreUnusable."""
    return max(names(folder), default=None)


def names(folder: Path) -> list[str]:
    """The names of all files that are or were in use. Raises: OSError, StoreUnusable.

    Links and files of other users are left out: they come from a time when others could write into the folder.
    """
    if not is_ours(folder):
        return []
    ours = _named(folder.name)
    with os.scandir(folder) as found:
        return [entry.name for entry in found if ours.fullmatch(entry.name) and _is_own_file(entry)]


def _is_own_file(entry: "os.DirEntry[str]") -> bool:
    try:
        seen = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # removed meanwhile
        return False
    return stat.S_ISREG(seen.st_mode) and seen.st_uid == os.geteuid()


def names_of_others(folder: Path) -> list[str]:
    """The names of the files of other formats. Raises: OSError, StoreUnusable."""
    found = os.listdir(folder) if is_ours(folder) else []
    of_any, ours = _named_in_any_format(folder.name), _named(folder.name)
    return [name for name in found if of_any.fullmatch(name) and not ours.fullmatch(name)]


def begin(folder: Path) -> str:
    """Make a file that is in use from now on, and remove all but the last one before it; returns its name.

    Raises: OSError, StoreUnusable.
    """
    if not is_ours(folder):
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        is_ours(folder)
    former = sorted(names(folder))
    number = int(former[-1].split("-")[-2]) + 1 if former else 0
    name = f"{folder.name}-v{FORMAT}-{number:08}-{token_hex(4)}.sqlite"
    os.close(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    for older in former[:-1]:
        remove(folder / older)
    return name


def remove(file: Path) -> int:
    """Remove one database with SQLite's own files beside it; returns how many there were. Raises: OSError."""
    removed = 0
    for path in _with_own_files(file):
        with suppress(FileNotFoundError):
            path.unlink()
            removed += 1
    return removed


def sizes(file: Path) -> list[int]:
    """The bytes of each file that `remove` would remove. Raises: OSError."""
    found = []
    for path in _with_own_files(file):
        with suppress(FileNotFoundError):
            found.append(path.stat().st_size)
    return found


def changed_s(file: Path) -> float:
    """When a database was last written to, in seconds since the epoch; 0 where it is gone. Raises: OSError."""
    last = 0.0
    for path in _with_own_files(file):
        with suppress(FileNotFoundError):
            last = max(last, path.lstat().st_mtime)
    return last


def connect(file: Path, wait_s: float) -> sqlite3.Connection:
    """A connection to a file that is there, for any thread of this process; it waits `wait_s` for locks of others.

    Raises: sqlite3.Error.
    """
    connection = sqlite3.connect(
        f"{file.as_uri()}?mode=rw", uri=True, timeout=wait_s, isolation_level=None, check_same_thread=False
    )
    try:
        # Not mapped: a mapped file that somebody cuts off kills the process that looks at it. And what a transaction
        # has changed is written at its end, all at once, since nobody can read meanwhile.
        connection.executescript(
            f"PRAGMA mmap_size=0; PRAGMA cache_size=-{CACHE_KIB}; PRAGMA cache_spill=OFF; PRAGMA synchronous=OFF;"
        )
        (mode,) = connection.execute("PRAGMA journal_mode=TRUNCATE").fetchone()
        if mode != "truncate":  # it is another program's, which uses it
            raise sqlite3.DatabaseError(f"its journal_mode is {mode}")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def make_table(connection: sqlite3.Connection) -> None:
    """Make the table, if there is none. Raises: sqlite3.Error, also where the file is not one of ours."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        connection.executescript(
            f"""BEGIN IMMEDIATE;
            CREATE TABLE IF NOT EXISTS records(key BLOB PRIMARY KEY, frame BLOB NOT NULL, written_s INTEGER NOT NULL);
            CREATE INDEX IF NOT EXISTS by_time ON records(written_s);
            PRAGMA user_version={FORMAT};
            COMMIT;"""
        )
        version = FORMAT
    check_format(version)


def check_format(version: int) -> None:
    """Raises: sqlite3.DatabaseError for a file that has our name, and is not what we wrote."""
    if version != FORMAT:
        raise sqlite3.DatabaseError(f"its user_version is {version}, expected {FORMAT}")


@functools.cache
def _named(kind: str) -> re.Pattern[str]:
    """The names of the files of a kind in this format."""
    return re.compile(rf"{re.escape(kind)}-v{FORMAT}-[0-9]{{8}}-[0-9a-f]{{8}}\.sqlite")


@functools.cache
def _named_in_any_format(kind: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(kind)}(-v[0-9]+)?-[0-9]{{8}}-[0-9a-f]{{8}}\.sqlite")


def _with_own_files(file: Path) -> list[Path]:
    return [file, *(file.with_name(file.name + ending) for ending in _OWN_FILES)]
