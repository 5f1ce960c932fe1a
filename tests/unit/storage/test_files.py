# SPDX-License-Identifier: Apache-2.0
"""Entries as files: the contract, and what is special about a directory and its lock."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.refusals import limited_files, unwritable
from tests.support.storage_contract import BUDGET_BYTES, Place, StorageContract
from vllm_mmcache.storage import files
from vllm_mmcache.storage.backend import Backend
from vllm_mmcache.storage.files import FileBackend, OpenFile
from vllm_mmcache.storage.kind import Kind


class FilesPlace(Place):
    entry_class = OpenFile

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"

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

    def lay_strangers(self, kind: Kind) -> None:
        root = self.backend(kind).root
        (entry,) = root.glob(f"??/*{kind.suffix}")
        self._strangers = [
            root / "notes.txt",
            entry.parent / "notes.txt",
            entry.with_name(entry.name + ".bak"),
            root / entry.name,
        ]
        for path in self._strangers:
            path.write_bytes(b"mine")

    def strangers(self, kind: Kind) -> int:
        return sum(path.exists() and path.read_bytes() == b"mine" for path in self._strangers)

    def remove(self) -> None:
        shutil.rmtree(self.store)

    @contextmanager
    def full(self, backend: Backend) -> Iterator[None]:
        with limited_files(100):
            yield

    @contextmanager
    def read_only(self, backend: Backend) -> Iterator[None]:
        with unwritable(self.store):
            yield

    @contextmanager
    def unreachable(self, backend: Backend) -> Iterator[None]:
        away = self.store.with_name("away")
        if self.store.exists():
            self.store.rename(away)
        self.store.write_bytes(b"")
        yield
        self.store.unlink()
        if away.exists():
            away.rename(self.store)

    @contextmanager
    def not_ours(self, backend: Backend) -> Iterator[None]:
        assert isinstance(backend, FileBackend)
        elsewhere = self.store / "elsewhere"
        backend.root.rename(elsewhere)
        backend.root.symlink_to(elsewhere)
        yield
        backend.root.unlink()
        elsewhere.rename(backend.root)

    @contextmanager
    def busy(self, backend: Backend) -> Iterator[None]:
        """The lock as someone on another machine may hold it."""
        assert isinstance(backend, FileBackend)
        with pytest.MonkeyPatch.context() as patch, locked(backend):
            patch.setattr(files, "LOCK_S", 0.05)
            yield


@contextmanager
def locked(backend: FileBackend) -> Iterator[None]:
    with open(backend.root / "lock", "rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class TestFiles(StorageContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> FilesPlace:
        return FilesPlace(tmp_path)


def age(path: Path, seconds: float) -> None:
    """As if it was used so much longer ago."""
    used_s = path.lstat().st_mtime - seconds
    os.utime(path, (used_s, used_s), follow_symlinks=False)
