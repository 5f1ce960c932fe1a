# SPDX-License-Identifier: Apache-2.0
"""Entries as files of a directory: one per entry, a budget that several processes keep together, no index.

    <store>/features/            mode 0700, ours alone; the folder and the ending are the kind's
        lock                     flock of whoever changes the store; holds the account, the bytes in use, as text
        incoming                 the one file being written
        ab/ab12....safetensors   an entry under its name; the time of last use is its mtime
        aside/                   the last few files that were no whole entry

Every change but setting aside happens under the lock, so there is one writer, one unfinished file at most, and the
account is never below the truth: it is raised before a file appears and lowered after files are gone. Readers take no
lock; whoever changes the store waits for it until its holder has changed nothing for some seconds, since that one may
hang on another machine. No file is open between calls, so a fork shares nothing. A disk that is full or read-only still
serves what it holds. Any process, any thread.
"""

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_mmcache.base.errors import StoreCorrupt, StoreUnreadable, StoreUnusable
from vllm_mmcache.storage.backend import Backend, Buffer, Busy, EntryInfo, Usage
from vllm_mmcache.storage.directories import is_ours
from vllm_mmcache.storage.kind import Kind

DISK_REST_S = (30.0, 600.0)
MAX_ASIDE = 16
# One entry must not push all others out.
SHARE = 4
# A sweep evicts to below the budget by this part, so that not every write needs one: a sweep looks at every file.
SLACK = 0.1
LOCK_S = 5.0
"""Seconds that a change waits for the lock while no other one is made."""
LOCK_POLL_S = 0.002

# What reading one file of a disk that works may raise: a bad sector, a file that is gone on its server.
_OF_ONE_FILE = frozenset({errno.EIO, errno.ESTALE})
_SHARD = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True)
class File:
    """One file of the store. Units: used_s are seconds since the epoch."""

    path: Path
    num_bytes: int
    used_s: float


class OpenFile:
    """An entry's file that is open for reading. Raises: StoreCorrupt for what is no file, or another user's."""

    def __init__(self, file: int, path: Path) -> None:
        seen = os.fstat(file)
        if not stat.S_ISREG(seen.st_mode):
            raise StoreCorrupt("not a file")
        # It may be from a time when others could write into the directory.
        if seen.st_uid != os.geteuid():
            raise StoreCorrupt(f"a file of user {seen.st_uid}")
        self.num_bytes = seen.st_size
        self.written_s = seen.st_mtime
        self._file = file
        self._path = path

    def read_into(self, offset: int, buffer: memoryview, until: float = 0.0) -> None:
        """Fill `buffer` with the bytes from `offset`.

        Raises: OSError; StoreUnreadable where the fault may be this file's; StoreCorrupt where there are fewer bytes.
        """
        # Read, not mapped: a mapped file that someone truncates kills the process that looks at it.
        while buffer:
            try:
                num_bytes = os.preadv(self._file, [buffer], offset)
            except OSError as error:
                if error.errno in _OF_ONE_FILE:
                    raise StoreUnreadable(f"it can't be read at byte {offset}: {error}") from error
                raise
            if num_bytes == 0:
                raise StoreCorrupt(f"it ends at byte {offset}")
            buffer = buffer[num_bytes:]
            offset += num_bytes

    def is_current(self) -> bool:
        """Whether the entry's name still leads to this file."""
        try:
            return os.path.samestat(os.fstat(self._file), os.lstat(self._path))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return False
            raise

    def mark_used(self) -> None:
        """Set the time of last use; on a read-only disk nothing happens."""
        with suppress(OSError):
            os.utime(self._file)


class FileBackend(Backend):
    """The files of one kind below the directory `place`, up to `budget_bytes`, one entry up to a quarter of that.

    Units: what was not used for `ttl_s` seconds is removed by the next sweep; 0 for never.
    """

    tier = "disk"
    failures = (OSError, StoreUnusable)
    rest_s = DISK_REST_S
    remedy = "run this as the store's owner"

    def __init__(self, place: str | Path, kind: Kind, budget_bytes: int, *, ttl_s: int = 0) -> None:
        self.where = str(place)
        self.root = Path(place) / kind.name
        self.budget_bytes: int = budget_bytes
        self.max_bytes = budget_bytes // SHARE
        self.ttl_s = ttl_s
        self._suffix = kind.suffix
        self._names = re.compile(rf"[0-9a-f]{{64}}{re.escape(kind.suffix)}")
        self._swept_by = 0  # process id

    def path_of(self, name: bytes) -> Path:
        """Where an entry lies."""
        digits = name.hex()
        return self.root / digits[:2] / (digits + self._suffix)

    def is_there(self) -> bool:
        """As `is_ours`, of the kind's directory."""
        return is_ours(self.root)

    @contextmanager
    def open(self, name: bytes) -> Iterator["OpenFile | None"]:
        """As Backend says. Raises: StoreUnusable, too, as in `is_there`."""
        file = self._opened(name) if self.is_there() else None
        if file is None:
            yield None
            return
        try:
            yield OpenFile(file, self.path_of(name))
        finally:
            os.close(file)

    def touch(self, name: bytes) -> bool:
        """As Backend says. Raises: StoreUnusable, too, as in `is_there`."""
        try:
            if self.is_there():
                os.utime(self.path_of(name), follow_symlinks=False)
                return True
        except FileNotFoundError:
            pass
        return False

    def put(self, name: bytes, parts: Iterable[Buffer], num_bytes: int) -> Usage:
        """As Backend says. Raises: StoreUnusable, too, where the lock is not to be had, or the budget is too small."""
        return self._put(name, parts, num_bytes, replaces=False)

    def put_many(self, entries: Mapping[bytes, bytes]) -> Usage:
        """As Backend says."""
        usage = Usage()
        for name, content in entries.items():
            later = self._put(name, [content], len(content), replaces=True)
            usage = Usage(later.held_bytes, usage.num_evicted + later.num_evicted)
        return usage

    def sweep(self) -> Usage:
        """As Backend says, and remove the unfinished file. Raises: Busy, too, where the lock is not to be had."""
        if not self.is_there():
            return Usage()
        with self._locked() as account:
            self._incoming.unlink(missing_ok=True)
            held, evicted = self._sweep(0)
            _write_account(account, held)
        return Usage(held, evicted)

    def to_sweep(self) -> tuple[int, int]:
        """As Backend says; without the lock, so that it waits for nobody."""
        files = self._too_much(0)[1] if self.is_there() else []
        return len(files), sum(file.num_bytes for file in files)

    def clear(self) -> int:
        """Remove every entry and every file set aside, and all folders that hold nothing else then."""
        if not self.is_there():
            return 0
        with self._locked() as account:
            self._incoming.unlink(missing_ok=True)
            num_files = sum(_remove(file.path) for file in [*self.files(), *self.aside()])
            _write_account(account, 0)
            shards = [Path(found.path) for found in _scan(self.root) if _SHARD.fullmatch(found.name)]
            for folder in (*shards, self.root / "aside"):
                _remove_folder(folder)
            # Who waits for this lock sees that it is gone, and makes another one.
            (self.root / "lock").unlink()
            _remove_folder(self.root)
        return num_files

    def to_clear(self) -> tuple[int, int]:
        """As Backend says, with the files set aside."""
        if not self.is_there():
            return 0, 0
        files = [*self.files(), *self.aside()]
        return len(files), sum(file.num_bytes for file in files)

    def scan(self) -> Iterator[EntryInfo]:
        """As Backend says."""
        for file in self.files():
            yield EntryInfo(bytes.fromhex(file.path.name.removesuffix(self._suffix)), file.num_bytes, file.used_s)

    def files(self) -> Iterator[File]:
        """Every entry's file, in no order."""
        for shard in _scan(self.root):
            if _SHARD.fullmatch(shard.name) and shard.is_dir(follow_symlinks=False):
                yield from self._files(Path(shard.path))

    def num_rejected(self) -> int:
        """As Backend says."""
        return sum(1 for _ in self.aside())

    def aside(self) -> Iterator[File]:
        """Every file that was set aside, in no order."""
        return self._files(self.root / "aside")

    def reject(self, name: bytes) -> None:
        """Move a file that is no whole entry out of the way, and keep the last few such files for a look."""
        path = self.path_of(name)
        target = self.root / "aside" / path.name
        with suppress(FileNotFoundError):  # somebody else was faster, or has cleared the store
            target.parent.mkdir(mode=0o700, exist_ok=True)
            os.replace(path, target)
        for file in sorted(self.aside(), key=lambda file: file.used_s)[:-MAX_ASIDE]:
            _remove(file.path)

    def _put(self, name: bytes, parts: Iterable[Buffer], num_bytes: int, *, replaces: bool) -> Usage:
        if num_bytes > self.budget_bytes:
            raise StoreUnusable(f"{self.budget_bytes} bytes for {self.root} have no room for {num_bytes}")
        path = self.path_of(name)
        with self._locked(makes=True) as account:
            held = _read_account(account)
            evicted = 0
            if not replaces and self.touch(name):
                return Usage(held or 0)
            # Once per process in any case: others may have put files here, or taken some away.
            if held is None or self._swept_by != os.getpid() or held + num_bytes > self.budget_bytes:
                held, evicted = self._sweep(num_bytes)
                self._swept_by = os.getpid()
            _write_account(account, held + num_bytes)
            try:
                self._publish(path, parts)
            except BaseException:
                _write_account(account, held)
                raise
            _sync(path.parent)
        return Usage(held + num_bytes, evicted)

    @property
    def _incoming(self) -> Path:
        return self.root / "incoming"

    def _make(self) -> None:
        if not self.is_there():
            self.root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.root.mkdir(mode=0o700, exist_ok=True)
            self.is_there()

    @contextmanager
    def _locked(self, *, makes: bool = False) -> Iterator[int]:
        until = time.monotonic() + LOCK_S
        while (lock := self._lock_once(makes)) is None:
            if time.monotonic() > until:
                raise StoreUnusable(f"{self.root} is removed again and again")
        try:
            yield lock
        finally:
            # Closing alone would leave the lock with a child forked meanwhile.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)

    def _lock_once(self, makes: bool) -> int | None:
        """The lock, held; None where the store was removed meanwhile."""
        if not makes and not self.is_there():
            raise StoreUnusable(f"there is no store in {self.root.parent}")
        place = self.root / "lock"
        try:
            if makes:
                self._make()
            lock = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return None
        is_ours_alone = False
        try:
            self._wait_for(lock)
            with suppress(FileNotFoundError):
                is_ours_alone = os.path.samestat(os.fstat(lock), os.lstat(place))
        finally:
            if not is_ours_alone:
                os.close(lock)
        return lock if is_ours_alone else None

    def _wait_for(self, lock: int) -> None:
        """Take the lock. Raises: Busy once its holder has hung for LOCK_S."""
        until, account = time.monotonic() + LOCK_S, _read_account(lock)
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if (changed := _read_account(lock)) != account:  # others have the lock in turn, and it goes to anyone
                until, account = time.monotonic() + LOCK_S, changed
            if time.monotonic() > until:
                place = self.root / "lock"
                raise Busy(f"{place} was held by another process for {LOCK_S:g} s: wait for it, or end it")
            time.sleep(LOCK_POLL_S)

    def _opened(self, name: bytes) -> int | None:
        path = self.path_of(name)
        try:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError:
            if path.is_symlink():
                raise StoreCorrupt("a symbolic link") from None
            raise

    def _sweep(self, needed_bytes: int) -> tuple[int, int]:
        held, files = self._too_much(needed_bytes)
        return held, sum(_remove(file.path) for file in files)

    def _too_much(self, needed_bytes: int) -> tuple[int, list[File]]:
        """The files that have to go to make room for so much, or since their time is over; and the bytes of the rest.

        Reads alone.
        """
        # Entries before aside: a file that is set aside meanwhile is counted twice rather than not at all.
        files = sorted(self.files(), key=lambda file: file.used_s)
        aside = list(self.aside())
        held = sum(file.num_bytes for file in (*files, *aside))
        limit = self.budget_bytes if held + needed_bytes <= self.budget_bytes else self.budget_bytes * (1 - SLACK)
        chosen = []
        for file in (*aside, *files):
            if held + needed_bytes > limit or self._is_over(file):
                chosen.append(file)
                held -= file.num_bytes
        return held, chosen

    def _is_over(self, file: File) -> bool:
        return 0 < self.ttl_s < time.time() - file.used_s

    def _publish(self, path: Path, parts: Iterable[Buffer]) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(self._incoming, flags, 0o600), "wb", buffering=0) as file:
                for part in parts:
                    rest = memoryview(part)
                    while rest:
                        rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            os.rename(self._incoming, path)
        except OSError:
            self._incoming.unlink(missing_ok=True)
            raise

    def _files(self, folder: Path) -> Iterator[File]:
        for found in _scan(folder):
            with suppress(FileNotFoundError):
                if self._names.fullmatch(found.name) and not found.is_dir(follow_symlinks=False):
                    seen = found.stat(follow_symlinks=False)
                    yield File(Path(found.path), seen.st_size, seen.st_mtime)


def _scan(folder: Path) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _remove_folder(folder: Path) -> None:
    with suppress(OSError):  # it holds what is not ours, or is not there
        folder.rmdir()


def _read_account(lock: int) -> int | None:
    text = os.pread(lock, 32, 0)
    return int(text) if re.fullmatch(rb"[0-9]{1,20}\n", text) else None


def _write_account(lock: int, num_bytes: int) -> None:
    os.pwrite(lock, b"%020d\n" % num_bytes, 0)


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
