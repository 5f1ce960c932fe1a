# SPDX-License-Identifier: Apache-2.0
"""The files of the disk tier: one per package, a budget that several processes keep together, no index.

    <store>/features/            mode 0700, ours alone
        lock                     flock of whoever changes the store; holds the account, the bytes in use, as text
        incoming                 the one file being written
        ab/ab12....safetensors   a package under its key; the time of last use is its mtime
        aside/                   the last few files that were no whole package

Every change but setting aside happens under the lock, so there is one writer, one unfinished file at most, and the
account is never below the truth: it is raised before a file appears and lowered after files are gone. Readers take no
lock. Nothing stays open between calls, so a fork shares nothing. Runs in the writer thread and the command line.
"""

import fcntl
import io
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_mmcache.errors import StoreCorrupt, StoreUnusable

SUFFIX = ".safetensors"
MAX_ASIDE = 16
# A sweep evicts to below the budget by this part, so that not every write needs one: a sweep looks at every file.
SLACK = 0.1

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
        return self.path.name.removesuffix(SUFFIX)


class Directory:
    """The store in the directory `place`. Raises: OSError from every method, where the system refuses."""

    def __init__(self, place: str | Path) -> None:
        self.root = Path(place) / "features"
        self._swept_by = 0  # process id

    def path_of(self, key: str) -> Path:
        """Where a package lies. `key` is 64 hex digits, never a client's text."""
        return self.root / key[:2] / (key + SUFFIX)

    def is_there(self) -> bool:
        """Whether there is a store that may be trusted.

        Raises: StoreUnusable where others than this user could have written it.
        """
        try:
            seen = self.root.lstat()
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid() or seen.st_mode & 0o077:
            raise StoreUnusable(
                f"{self.root} has mode {stat.filemode(seen.st_mode)} and owner {seen.st_uid}, expected a directory "
                f"drwx------ of user {os.geteuid()}: remove it, or choose another store"
            )
        return True

    def read(self, key: str, max_bytes: int, *, touch: bool = True) -> bytes | None:
        """The bytes under `key`, with `touch` now used last; None where there are none.

        Raises: StoreCorrupt for what is no file, or is longer than `max_bytes`; StoreUnusable as in `is_there`.
        """
        if not self.is_there():
            return None
        try:
            file = os.open(self.path_of(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError:
            if self.path_of(key).is_symlink():
                raise StoreCorrupt("a symbolic link") from None
            raise
        try:
            seen = os.fstat(file)
            if not stat.S_ISREG(seen.st_mode):
                raise StoreCorrupt("not a file")
            if seen.st_size > max_bytes:
                raise StoreCorrupt(f"{seen.st_size} bytes, expected at most {max_bytes}")
            if touch:
                with suppress(OSError):  # read-only: served all the same
                    os.utime(file)
            # Read, not mapped: a mapped file that someone truncates kills the process that looks at it.
            return io.FileIO(file, closefd=False).readall()
        finally:
            os.close(file)

    def write(self, key: str, packed: bytes, budget_bytes: int) -> tuple[int, int]:
        """Put a package under `key` for good, within the budget. A key that is there is only marked as used.

        Returns the bytes in use and the number of files evicted. `packed` must fit into the budget.
        """
        self._make()
        path = self.path_of(key)
        with self._locked() as account:
            held = _read_account(account)
            evicted = 0
            if path.exists():
                os.utime(path)
                return held or 0, evicted
            # Once per process in any case: others may have put files here, or taken some away.
            if held is None or self._swept_by != os.getpid() or held + len(packed) > budget_bytes:
                held, evicted = self._sweep(budget_bytes, len(packed))
                self._swept_by = os.getpid()
            _write_account(account, held + len(packed))
            try:
                self._publish(path, packed)
            except BaseException:
                _write_account(account, held)
                raise
        return held + len(packed), evicted

    def sweep(self, budget_bytes: int) -> tuple[int, int]:
        """Remove the unfinished file, and evict until the budget holds. Returns bytes in use, files evicted."""
        with self._locked() as account:
            self._incoming.unlink(missing_ok=True)
            held, evicted = self._sweep(budget_bytes, 0)
            _write_account(account, held)
        return held, evicted

    def clear(self) -> int:
        """Remove every package and every file set aside; returns their number."""
        with self._locked() as account:
            self._incoming.unlink(missing_ok=True)
            num_files = sum(_remove(entry.path) for entry in [*self.packages(), *self.aside()])
            _write_account(account, 0)
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
        target.parent.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):
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
    def _locked(self) -> Iterator[int]:
        if not self.is_there():
            raise StoreUnusable(f"there is no store in {self.root.parent}")
        lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield lock
            finally:
                # Closing alone would leave the lock with a child forked meanwhile.
                fcntl.flock(lock, fcntl.LOCK_UN)
        finally:
            os.close(lock)

    def _sweep(self, budget_bytes: int, needed_bytes: int) -> tuple[int, int]:
        # Packages before aside: a file that is set aside meanwhile is counted twice rather than not at all.
        packages = sorted(self.packages(), key=lambda entry: entry.used_s)
        aside = list(self.aside())
        held = sum(entry.num_bytes for entry in (*packages, *aside))
        if held + needed_bytes <= budget_bytes:
            return held, 0
        evicted = 0
        for entry in (*aside, *packages):
            if held + needed_bytes <= budget_bytes * (1 - SLACK):
                break
            evicted += _remove(entry.path)
            held -= entry.num_bytes
        return held, evicted

    def _publish(self, path: Path, packed: bytes) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(self._incoming, flags, 0o600), "wb") as file:
                file.write(packed)
                file.flush()
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
