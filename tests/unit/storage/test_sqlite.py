# SPDX-License-Identifier: Apache-2.0
"""Small entries in SQLite: the contract, and what is special about a database that others may replace."""

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.support.refusals import limited_files, unwritable
from tests.support.storage_contract import BUDGET_BYTES, Place, StorageContract
from vllm_mmcache.storage import sqlite_file
from vllm_mmcache.storage.backend import Backend, BytesEntry
from vllm_mmcache.storage.kind import Kind
from vllm_mmcache.storage.sqlite import SqliteBackend


class SqlitePlace(Place):
    entry_class = BytesEntry
    a_hit_is_a_use = False
    usual_bytes = 500
    overshoot_bytes = 4 * 4096  # pages that a row's places in two indices may need

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"

    def backend(self, kind: Kind, *, ttl_s: int = 0, budget_bytes: int = BUDGET_BYTES) -> SqliteBackend:
        return SqliteBackend(self.store, kind, budget_bytes, ttl_s=ttl_s)

    def rows(self, kind: Kind, statement: str, *values: object) -> list[tuple[object, ...]]:
        """What another program does with the file in use; nothing where there is none."""
        name = sqlite_file.current(self.store / kind.name)
        if name is None:
            return []
        with closing(sqlite3.connect(self.store / kind.name / name)) as connection, connection:
            return connection.execute(statement, values).fetchall()

    def write(self, kind: Kind, name: bytes, content: object) -> None:
        self.rows(kind, "INSERT OR REPLACE INTO records VALUES (?, ?, 0)", name, content)

    def read(self, kind: Kind, name: bytes) -> bytes | None:
        found = self.rows(kind, "SELECT frame FROM records WHERE key = ?", name)
        return found[0][0] if found else None  # type: ignore[return-value]

    def age(self, kind: Kind, name: bytes, seconds: float) -> None:
        self.rows(kind, "UPDATE records SET written_s = written_s - ? WHERE key = ?", int(seconds), name)

    def lay_strangers(self, kind: Kind) -> None:
        folder = self.store / kind.name
        self._strangers = [
            folder / "notes.txt",
            folder / f"{kind.name}-v{sqlite_file.FORMAT}-99999999.sqlite",
            folder / f"other-v{sqlite_file.FORMAT}-99999999-0a1b2c3d.sqlite",
            folder / f"{kind.name}-v{sqlite_file.FORMAT + 1}-99999999-0a1b2c3d.sqlite",
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
        backend.close()  # what is open already can be written to
        with unwritable(self.store):
            yield
        backend.close()

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
        assert isinstance(backend, SqliteBackend)
        elsewhere = self.store / "elsewhere"
        backend.folder.rename(elsewhere)
        backend.folder.symlink_to(elsewhere)
        yield
        backend.folder.unlink()
        elsewhere.rename(backend.folder)

    @contextmanager
    def busy(self, backend: Backend) -> Iterator[None]:
        """SQLite's exclusive lock, as a program that looks at the file may hold it."""
        assert isinstance(backend, SqliteBackend)
        backend.close()
        name = sqlite_file.current(backend.folder)
        assert name is not None
        with (
            pytest.MonkeyPatch.context() as patch,
            closing(sqlite3.connect(backend.folder / name, isolation_level=None)) as other,
        ):
            other.execute("PRAGMA locking_mode=EXCLUSIVE")
            other.execute("BEGIN EXCLUSIVE")
            patch.setattr(backend._writing_to, "_wait_s", 0.05)
            patch.setattr(backend._reading_from, "_wait_s", 0.05)
            yield
            other.execute("COMMIT")
        backend.close()  # a connection has its wait for good


class TestSqlite(StorageContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> SqlitePlace:
        return SqlitePlace(tmp_path)
