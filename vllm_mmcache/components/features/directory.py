# SPDX-License-Identifier: Apache-2.0
"""The files of the disk tier: one per package, a budget that several processes keep together, no index.

    <store>/features/            mode 0700, ours alone
        lock                     flock of whoever changes the store; holds the account, the bytes in use, as text
        incoming                 the one file being written
        ab/ab12....safetensors   a package under its key; the time of last use is its mtime
        aside/                   the last few files that were no whole package

Every change but setting aside happens under the lock, so there is one writer, one unfinished file at most, and the
account is never below the truth: it is raised before a file appears and lowered after files are gone. Readers take no
lock; whoever changes the store waits for it for some seconds, since its holder may hang on another machine. No file is
open between calls, so a fork shares nothing. Runs in the threads of the store and in the command line.
"""

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_mmcache.base.errors import StoreCorrupt, StoreUnusable
from vllm_mmcache.storage.directories import is_ours
from vllm_mmcache.storage.encryption import Buffer

SUFFIX = ".safetensors"
MAX_ASIDE = 16
# A sweep evicts to below the budget by this part, so that not every write needs one: a sweep looks at every file.
SLACK = 0.1
LOCK_S = 5.0
"""Seconds that a change waits for the lock."""
LOCK_POLL_S = 0.002

_FILE = re.compile(r"[0-9a-f]{64}\.safetensors")
_SHARD = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True)
class Entry:
    """One file of the store. Units: used_s are seconds since the epoch."""

    path: Path
    num_bytes: int
    used_s: float

    @property
    def key(self) -> str:
        """The key of the package, 64 hex digits: its file's name without the ending."""
        return self.path.name.removesuffix(SUFFIX)


class OpenFile:
    """A package's file that is open for reading. Raises: StoreCorrupt for what is no file, or another user's."""

    def __init__(self, file: int, path: Path) -> None:
        seen = os.fstat(file)
        if not stat.S_ISREG(seen.st_mode):
            raise StoreCorrupt("not a file")
        # It may be from a time when others could write into the directory.
        if seen.st_uid != os.geteuid():
            raise StoreCorrupt(f"a file of user {seen.st_uid}")
        self.num_bytes = seen.st_size
        self._file = file
        self._path = path

    def read_into(self, offset: int, buffer: memoryview, until: float = 0.0) -> None:
        """Fill `buffer` with the bytes from `offset`. Raises: OSError, and StoreCorrupt where there are fewer."""
        # Read, not mapped: a mapped file that someone truncates kills the process that looks at it.
        while buffer:
            num_bytes = os.preadv(self._file, [buffer], offset)
            if num_bytes == 0:
                raise StoreCorrupt(f"it ends at byte {offset}")
            buffer = buffer[num_bytes:]
            offset += num_bytes

    def is_current(self) -> bool:
        """Whether the package's name still leads to this file."""
        try:
            return os.path.samestat(os.fstat(self._file), os.lstat(self._path))
        except FileNotFoundError:
            return False


class Directory:
    """The store in the directory `place`. Raises: OSError from every method, where the system refuses.

    ttl_s: seconds after their last use when files are removed by the next sweep; 0 for never.
    """

    def __init__(self, place: str | Path, ttl_s: int = 0) -> None:
        self.root = Path(place) / "features"
        self._ttl_s = ttl_s
        self._swept_by = 0  # process id

    def path_of(self, key: str) -> Path:
        """Where a package lies. `key` is 64 hex digits, never a client's text."""
        return self.root / key[:2] / (key + SUFFIX)

    def is_there(self) -> bool:
        """As `is_ours`, of the store's directory."""
        return is_ours(self.root)

    @contextmanager
    def open(self, key: str, *, touch: bool = True) -> Iterator["OpenFile | None"]:
        """The file under `key`, with `touch` now the most recently used; None where there is none.

        Raises: StoreCorrupt for what is no file; StoreUnusable as in `is_there`.
        """
        file = self._opened(key) if self.is_there() else None
        if file is None:
            yield None
            return
        try:
            opened = OpenFile(file, self.path_of(key))
            if touch:
                with suppress(OSError):  # read-only: served all the same
                    os.utime(file)
            yield opened
        finally:
            os.close(file)

    def renew(self, key: str) -> bool:
        """Whether there is something under `key`, which is now the most recently used.

        Raises: StoreUnusable as in `is_there`.
        """
        try:
            if self.is_there():
                os.utime(self.path_of(key), follow_symlinks=False)
                return True
        except FileNotFoundError:
            pass
        return False

    def write(self, key: str, parts: Iterable[Buffer], num_bytes: int, budget_bytes: int) -> tuple[int, int]:
        """Put a package of `num_bytes`, in parts that follow each other, under `key` for good, within the budget.

        A key that is there is only marked as used. Returns the bytes in use and the number of files evicted. The
        package must fit into the budget. Raises: StoreUnusable, too, where the lock is not to be had.
        """
        path = self.path_of(key)
        with self._locked(makes=True) as account:
            held = _read_account(account)
            evicted = 0
            if self.renew(key):
                return held or 0, evicted
            # Once per process in any case: others may have put files here, or taken some away.
            if held is None or self._swept_by != os.getpid() or held + num_bytes > budget_bytes:
                held, evicted = self._sweep(budget_bytes, num_bytes)
                self._swept_by = os.getpid()
            _write_account(account, held + num_bytes)
            try:
                self._publish(path, parts)
            except BaseException:
                _write_account(account, held)
                raise
        return held + num_bytes, evicted

    def sweep(self, budget_bytes: int) -> tuple[int, int]:
        """Remove the unfinished file and what was not used for long, and evict until the budget holds.

        Returns bytes in use, files evicted.
        """
        with self._locked() as account:
            self._incoming.unlink(missing_ok=True)
            held, evicted = self._sweep(budget_bytes, 0)
            _write_account(account, held)
        return held, evicted

    def clear(self) -> int:
        """Remove every package and every file set aside, and all folders that hold nothing else then.

        Returns the number of files.
        """
        with self._locked() as account:
            self._incoming.unlink(missing_ok=True)
            num_files = sum(_remove(entry.path) for entry in [*self.packages(), *self.aside()])
            _write_account(account, 0)
            shards = [Path(found.path) for found in _scan(self.root) if _SHARD.fullmatch(found.name)]
            for folder in (*shards, self.root / "aside"):
                _remove_folder(folder)
            # Who waits for this lock sees that it is gone, and makes another one.
            (self.root / "lock").unlink()
            _remove_folder(self.root)
        return num_files

    def packages(self) -> Iterator[Entry]:
        """Every package's file, in no order."""
        for shard in _scan(self.root):
            if _SHARD.fullmatch(shard.name) and shard.is_dir(follow_symlinks=False):
                yield from _entries(Path(shard.path))

    def aside(self) -> Iterator[Entry]:
        """Every file that was set aside, in no order."""
        return _entries(self.root / "aside")

    def set_aside(self, key: str) -> None:
        """Move a file that is no whole package out of the way, and keep the last few such files for a look."""
        target = self.root / "aside" / (key + SUFFIX)
        with suppress(FileNotFoundError):  # somebody else was faster, or has cleared the store
            target.parent.mkdir(mode=0o700, exist_ok=True)
            os.replace(self.path_of(key), target)
        for entry in sorted(self.aside(), key=lambda entry: entry.used_s)[:-MAX_ASIDE]:
            _remove(entry.path)

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
        while (lock := self._lock_once(makes, until)) is None:
            if time.monotonic() > until:
                raise StoreUnusable(f"{self.root} is removed again and again")
        try:
            yield lock
        finally:
            # Closing alone would leave the lock with a child forked meanwhile.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)

    def _lock_once(self, makes: bool, until: float) -> int | None:
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
            self._wait_for(lock, until)
            with suppress(FileNotFoundError):
                is_ours_alone = os.path.samestat(os.fstat(lock), os.lstat(place))
        finally:
            if not is_ours_alone:
                os.close(lock)
        return lock if is_ours_alone else None

    def _wait_for(self, lock: int, until: float) -> None:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if time.monotonic() > until:
                place = self.root / "lock"
                raise StoreUnusable(f"{place} was held by another process for {LOCK_S:g} s: wait for it, or end it")
            time.sleep(LOCK_POLL_S)

    def _opened(self, key: str) -> int | None:
        path = self.path_of(key)
        try:
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError:
            if path.is_symlink():
                raise StoreCorrupt("a symbolic link") from None
            raise

    def _sweep(self, budget_bytes: int, needed_bytes: int) -> tuple[int, int]:
        # Packages before aside: a file that is set aside meanwhile is counted twice rather than not at all.
        packages = sorted(self.packages(), key=lambda entry: entry.used_s)
        aside = list(self.aside())
        held = sum(entry.num_bytes for entry in (*packages, *aside))
        limit = budget_bytes if held + needed_bytes <= budget_bytes else budget_bytes * (1 - SLACK)
        evicted = 0
        for entry in (*aside, *packages):
            if held + needed_bytes > limit or self._is_over(entry):
                evicted += _remove(entry.path)
                held -= entry.num_bytes
        return held, evicted

    def _is_over(self, entry: Entry) -> bool:
        return 0 < self._ttl_s < time.time() - entry.used_s

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
        _sync(path.parent)


def _entries(folder: Path) -> Iterator[Entry]:
    for file in _scan(folder):
        with suppress(FileNotFoundError):
            if _FILE.fullmatch(file.name) and not file.is_dir(follow_symlinks=False):
                seen = file.stat(follow_symlinks=False)
                yield Entry(Path(file.path), seen.st_size, seen.st_mtime)


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
