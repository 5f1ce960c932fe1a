# SPDX-License-Identifier: Apache-2.0
"""Entries as files: the contract, and what is special about a directory and its lock."""

import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.packages import SHAPE, features, file_tier, held_bytes, identity, load, save
from tests.support.refusals import limited_files, unwritable
from tests.support.storage_contract import BUDGET_BYTES, THINGS, DirectoryPlace, StorageContract, during
from tests.support.tiers import LONG_S
from vllm_mmcache.base.errors import StoreUnusable
from vllm_mmcache.components.features.package import Shape
from vllm_mmcache.storage import files
from vllm_mmcache.storage.backend import Backend, Busy
from vllm_mmcache.storage.files import FileBackend, OpenFile
from vllm_mmcache.storage.kind import Kind
from vllm_mmcache.storage.tier import PIECE_BYTES


class FilesPlace(DirectoryPlace):
    entry_class = OpenFile

    def backend(self, kind: Kind, *, ttl_s: int = 0, budget_bytes: int = BUDGET_BYTES) -> FileBackend:
        return FileBackend(self.store, kind, budget_bytes, ttl_s=ttl_s)

    def path(self, kind: Kind, name: bytes) -> Path:
        return self.backend(kind).path_of(name)

    def write(self, kind: Kind, name: bytes, content: bytes) -> None:
        self.path(kind, name).parent.mkdir(mode=0o700, exist_ok=True)
        self.path(kind, name).write_bytes(content)

    def read(self, kind: Kind, name: bytes) -> bytes | None:
        path = self.path(kind, name)
        return path.read_bytes() if path.exists() else None

    def age(self, kind: Kind, name: bytes, seconds: float) -> None:
        if self.path(kind, name).exists():
            age(self.path(kind, name), seconds)

    def folder_of(self, backend: Backend) -> Path:
        assert isinstance(backend, FileBackend)
        return backend.root

    def stranger_paths(self, kind: Kind) -> list[Path]:
        root = self.backend(kind).root
        (entry,) = root.glob(f"??/*{kind.suffix}")
        return [
            root / "notes.txt",
            entry.parent / "notes.txt",
            entry.with_name(entry.name + ".bak"),
            root / entry.name,
        ]

    @contextmanager
    def read_only(self, backend: Backend) -> Iterator[None]:
        with unwritable(self.store):
            yield

    @contextmanager
    def busy(self, backend: Backend) -> Iterator[None]:
        """The lock as someone on another machine may hold it."""
        assert isinstance(backend, FileBackend)
        with pytest.MonkeyPatch.context() as patch, locked(backend):
            patch.setattr(files, "LOCK_S", 0.05)
            yield


@contextmanager
def locked(backend: FileBackend) -> Iterator[int]:
    with open(backend.root / "lock", "rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def age(path: Path, seconds: float) -> None:
    """As if it was used so much longer ago."""
    used_s = path.lstat().st_mtime - seconds
    os.utime(path, (used_s, used_s), follow_symlinks=False)


class TestFiles(StorageContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> FilesPlace:
        return FilesPlace(tmp_path)


LARGE = Shape(4096, 1536, "bfloat16")  # three pieces


@pytest.fixture
def backend(tmp_path: Path) -> FileBackend:
    return backend_at(tmp_path / "store")


def backend_at(store: Path, budget_bytes: int = BUDGET_BYTES, ttl_s: int = 0) -> FileBackend:
    return FileBackend(store, THINGS, budget_bytes, ttl_s=ttl_s)


def name(number: int) -> bytes:
    return b"%032d" % number


def put(backend: FileBackend, number: int, num_bytes: int = 1000) -> Path:
    backend.put(name(number), [(b"%d " % number).ljust(num_bytes, b"\0")], num_bytes)
    return backend.path_of(name(number))


def account(backend: FileBackend) -> int:
    return int((backend.root / "lock").read_text())


def test_nobody_else_may_look(backend: FileBackend) -> None:
    put(backend, 0)
    backend.reject(name(0))
    path = put(backend, 0)
    paths = [backend.root.parent, *backend.root.parent.rglob("*")]
    assert {path, backend.root / "aside" / path.name, backend.root / "lock"} <= set(paths)
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o700}


def to_a_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def to_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_another_user(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    "spoil", [to_a_link, to_a_folder, to_a_pipe, to_another_user, lambda path: os.truncate(path, 2**40)]
)
def test_what_is_no_file_of_ours_is_set_aside(
    tmp_path: Path, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it is: nobody waits for it, follows it, or reads all of it."""
    tier = file_tier(tmp_path)
    backend = tier.backend
    assert isinstance(backend, FileBackend)
    assert save(tier, 0)
    path = backend.path_of(bytes.fromhex(identity(0).key))
    spoil(path)
    assert load(tier, 0) is None
    assert not os.path.lexists(path)
    assert os.path.lexists(backend.root / "aside" / path.name)
    assert load(tier, 0) is None
    assert (tier.counts.snapshot()["set_aside"], tier.counts.snapshot()["errors"]) == (1, 0)
    assert "set aside" in caplog.text
    assert save(tier, 0)
    assert load(tier, 0) == features(0)


def test_what_is_set_aside_is_bounded_and_counts(tmp_path: Path) -> None:
    backend = backend_at(tmp_path, 30_000)
    for number in range(20):
        put(backend, number)
        backend.reject(name(number))
    assert backend.num_rejected() == files.MAX_ASIDE == len(list(backend.aside()))
    for number in range(100, 140):
        assert put(backend, number).exists()
        assert held_bytes(tmp_path) <= account(backend) <= 30_000
    assert not list(backend.aside())  # the first to go


def test_what_was_set_aside_goes_with_time(tmp_path: Path) -> None:
    backend = backend_at(tmp_path, ttl_s=1000)
    for number in (0, 1):
        put(backend, number)
        backend.reject(name(number))
    age(backend.root / "aside" / backend.path_of(name(0)).name, 1500)
    backend.sweep()
    assert [file.path.name for file in backend.aside()] == [backend.path_of(name(1)).name]


def test_the_account_is_what_is_there(backend: FileBackend, tmp_path: Path) -> None:
    for number in range(10):
        assert backend.put(name(number), [bytes(500)], 500).held_bytes == account(backend) == held_bytes(tmp_path)
    assert backend.put(name(0), [], 500).held_bytes == 5000  # it was there
    backend.put_many({name(20): bytes(100)})
    assert backend.sweep().held_bytes == account(backend) == held_bytes(tmp_path)


@pytest.mark.parametrize("text", [b"", b"garbage", b"-1\n", b"0" * 20 + b"\n", b"9" * 20 + b"\n"])
def test_a_wrong_account_is_corrected(tmp_path: Path, text: bytes) -> None:
    for number in range(10):
        put(backend_at(tmp_path, 100_000), number)
    (tmp_path / "things" / "lock").write_bytes(text)
    backend = backend_at(tmp_path, 6_000)
    put(backend, 10)
    assert account(backend) == held_bytes(tmp_path) <= 6_000


def test_the_one_used_longest_ago_goes_first(tmp_path: Path) -> None:
    backend = backend_at(tmp_path, 10_000)
    for number in range(10):
        os.utime(put(backend, number), (1000 + number, 1000 + number))
    with backend.open(name(0)) as entry:
        assert entry is not None
        assert entry.written_s == 1000
        entry.mark_used()
    assert backend.touch(name(1))
    put(backend, 10)
    there = [backend.path_of(name(number)).exists() for number in range(11)]
    assert there[:2] + there[10:] == [True, True, True]
    assert there[2:10] == sorted(there[2:10])
    assert not there[2]


def test_one_entry_has_a_quarter_of_the_budget_at_most(tmp_path: Path) -> None:
    for budget_bytes, kept in ((4 * SHAPE.num_bytes, True), (4 * SHAPE.num_bytes - 1, False)):
        tier = file_tier(tmp_path / str(kept), budget_bytes)
        assert save(tier, 0) == kept
        assert load(tier, 0) == (features(0) if kept else None)
        assert tier.counts.snapshot()["dropped"] == (not kept)


@pytest.mark.slow
def test_eighty_mebibytes(tmp_path: Path) -> None:
    shape = Shape(16384, 2560, "bfloat16")
    tier = file_tier(tmp_path, 10 * 1024**3)
    assert save(tier, 0, shape)
    assert load(tier, 0, shape) == features(0, shape)
    assert tier.counts.snapshot()["read_bytes"] == shape.num_bytes == 80 * 1024**2


def test_clear_leaves_what_is_not_ours_and_nothing_else(backend: FileBackend) -> None:
    path = put(backend, 0)
    put(backend, 1)
    backend.reject(name(1))
    (backend.root / "incoming").write_bytes(b"of a killed writer")
    strangers = [backend.root / "notes.txt", path.parent / "notes.txt"]
    for stranger in strangers:
        stranger.write_text("mine")
    assert backend.clear() == 2
    assert [file for file in backend.root.rglob("*") if file.is_file()] == strangers
    for stranger in strangers:
        stranger.unlink()
    put(backend, 0)
    backend.clear()
    assert list(backend.root.parent.iterdir()) == []


def test_what_a_killed_writer_leaves_is_written_over_or_swept(backend: FileBackend, tmp_path: Path) -> None:
    put(backend, 0)
    incoming = backend.root / "incoming"
    for go_on in (lambda: put(backend, 1), backend.sweep):
        incoming.write_bytes(b"of a killed writer" * 1000)
        go_on()
        assert not incoming.exists()
        assert account(backend) == held_bytes(tmp_path)
    incoming.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        put(backend, 2)
    assert not (tmp_path / "victim").exists()
    put(backend, 2)


def test_a_file_that_is_cut_off_while_it_is_read(tmp_path: Path) -> None:
    """It is read, not mapped: that would end the process."""
    tier, place = file_tier(tmp_path), FilesPlace(tmp_path)
    assert isinstance(tier.backend, FileBackend)
    assert save(tier, 0, LARGE)
    path = tier.backend.path_of(bytes.fromhex(identity(0).key))
    with during(place, lambda offset: os.truncate(path, 2 * PIECE_BYTES) if offset > PIECE_BYTES else None):
        assert load(tier, 0, LARGE) is None
    counts = tier.counts.snapshot()
    assert (counts["misses"], counts["set_aside"], counts["errors"]) == (1, 1, 0)
    assert save(tier, 0, LARGE)

    def cut_and_replace(offset: int) -> None:
        if offset > PIECE_BYTES and not (tmp_path / "cut").exists():
            whole = path.read_bytes()
            os.truncate(path, 2 * PIECE_BYTES)
            path.rename(tmp_path / "cut")
            path.write_bytes(whole)

    with during(place, cut_and_replace):
        assert load(tier, 0, LARGE) is None
    assert tier.counts.snapshot()["set_aside"] == 1  # what lies there now is another file
    assert load(tier, 0, LARGE) == features(0, LARGE)


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("may_move", [True, False], ids=["set aside", "in place"])
def test_a_file_that_can_t_be_read_keeps_nobody_from_the_others(
    tmp_path: Path, error: int, may_move: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that can't set it aside, either, is left alone."""
    tier = file_tier(tmp_path)
    assert isinstance(tier.backend, FileBackend)
    assert save(tier, 0)
    assert save(tier, 1)
    bad, read, rename = tier.backend.path_of(bytes.fromhex(identity(0).key)).stat().st_ino, os.preadv, os.replace

    def preadv(file: int, *args: Any) -> int:
        if os.fstat(file).st_ino == bad:
            raise OSError(error, os.strerror(error))
        return read(file, *args)

    def replace(*args: Any) -> None:
        if not may_move:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(*args)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "replace", replace)
    assert load(tier, 0) is None
    assert tier.is_open() != may_move
    assert load(tier, 1) == (features(1) if may_move else None)
    counts = tier.counts.snapshot()
    assert (counts["set_aside"], counts["errors"]) == (1, 0 if may_move else 1)


def test_a_file_that_is_gone_on_its_server_is_not_set_aside(
    backend: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies under its name now is another one."""

    def fail(file: int) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    put(backend, 0)
    with backend.open(name(0)) as entry:
        assert entry is not None
        with monkeypatch.context() as gone:
            gone.setattr(os, "fstat", fail)
            assert not entry.is_current()


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_file_that_goes_while_it_is_read_is_read_to_its_end(backend: FileBackend, how: str) -> None:
    path = put(backend, 0)
    with backend.open(name(0)) as entry:
        assert entry is not None
        assert entry.is_current()
        path.unlink()
        if how == "replaced":
            put(backend, 0, 3000)
        content = bytearray(1000)
        entry.read_into(0, memoryview(content), 0.0)
        assert content == b"0 " + bytes(998)
        assert not entry.is_current()


def test_a_lock_that_is_held_keeps_no_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_S", 0.2)
    tier = file_tier(tmp_path)
    backend = tier.backend
    assert isinstance(backend, FileBackend)
    assert save(tier, 0)
    assert save(tier, 1)
    backend.path_of(bytes.fromhex(identity(0).key)).write_bytes(b"no package")
    with locked(backend):
        assert load(tier, 0) is None  # and is set aside
        assert load(tier, 1) == features(1)
        assert save(tier, 1)  # it is there
        for work in (backend.sweep, backend.clear, lambda: put(backend, 2)):
            with pytest.raises(Busy, match=r"was held by another process for 0\.2 s: wait for it, or end it"):
                work()
    assert tier.counts.snapshot()["set_aside"] == 1
    assert backend.clear() == 2


def test_a_sweep_that_others_keep_from_the_lock_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made again later; the control: a write that can't be made is one."""
    monkeypatch.setattr(files, "LOCK_S", 0.05)
    tier = file_tier(tmp_path, ttl_s=1000)
    assert isinstance(tier.backend, FileBackend)
    assert save(tier, 0)
    with locked(tier.backend):
        tier.tidy()
        assert tier.is_taking()
        assert not save(tier, 1)
        assert not tier.is_taking()
    assert tier.counts.snapshot()["errors"] == 1


@pytest.mark.parametrize("is_removed", [False, True], ids=["given back", "removed meanwhile"])
def test_a_writer_waits_for_the_lock(backend: FileBackend, is_removed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it was removed with the store meanwhile, the lock is no lock any more, and the writer makes another one."""
    monkeypatch.setattr(files, "LOCK_S", LONG_S)
    waits = threading.Event()
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (waits.set(), sleep(seconds)))
    put(backend, 0)
    thread = threading.Thread(target=put, args=(backend, 1))
    with locked(backend):
        thread.start()
        assert waits.wait(LONG_S)
        assert not backend.path_of(name(1)).exists()
        if is_removed:
            shutil.rmtree(backend.root.parent)
    thread.join()
    assert [backend.path_of(name(number)).exists() for number in (0, 1)] == [not is_removed, True]
    assert account(backend) == (1000 if is_removed else 2000)


@pytest.mark.parametrize("gets_on", [True, False])
def test_a_lock_that_others_have_in_turn_is_waited_for(
    backend: FileBackend, gets_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes, as each of them changes the account; the control is a holder that hangs."""
    put(backend, 0)
    now = [0.0]
    with locked(backend) as lock:

        def sleep(seconds: float) -> None:
            now[0] += 0.6 * files.LOCK_S
            if gets_on:
                files._write_account(lock, int(1000 * now[0]))
            if now[0] > 3 * files.LOCK_S:
                fcntl.flock(lock, fcntl.LOCK_UN)

        monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep, time=time.time))
        if gets_on:
            put(backend, 1)
        else:
            with pytest.raises(StoreUnusable, match="was held by another process"):
                put(backend, 1)
    assert backend.path_of(name(1)).exists() == gets_on


def test_a_store_that_is_removed_again_and_again(backend: FileBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tries for ever."""
    monkeypatch.setattr(files, "LOCK_S", 0.05)
    wait_for = backend._wait_for

    def lose(lock: int) -> None:
        wait_for(lock)
        shutil.rmtree(backend.root)

    monkeypatch.setattr(backend, "_wait_for", lose)
    with pytest.raises(StoreUnusable, match="is removed again and again"):
        put(backend, 0)
    with pytest.raises(StoreUnusable, match="there is no store"), backend._locked():
        pass


def test_a_lock_that_is_a_link_is_not_followed(backend: FileBackend, tmp_path: Path) -> None:
    put(backend, 0)
    (tmp_path / "victim").write_text("mine")
    (backend.root / "lock").unlink()
    (backend.root / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        put(backend, 1)
    assert (tmp_path / "victim").read_text() == "mine"


def test_the_kernel_refuses_a_part(backend: FileBackend, tmp_path: Path) -> None:
    """A disk that fills up in the middle of an entry: the account and what was there are as before."""
    put(backend, 0, 5000)
    with limited_files(7000), pytest.raises(OSError, match="too large"):
        put(backend, 1, 100_000)
    assert sorted(path.name for path in backend.root.rglob("*") if path.is_file()) == [
        backend.path_of(name(0)).name,
        "lock",
    ]
    assert account(backend) == held_bytes(tmp_path) == 5000
    put(backend, 1, 100_000)


def test_a_folder_that_can_t_be_synced(backend: FileBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is there, so it counts."""

    def fail(folder: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    put(backend, 0)
    with monkeypatch.context() as patched:
        patched.setattr(files, "_sync", fail)
        with pytest.raises(OSError, match="Input/output"):
            put(backend, 1)
    assert backend.path_of(name(1)).exists()
    assert account(backend) == held_bytes(tmp_path) == 2000
