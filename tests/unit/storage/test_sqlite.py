# SPDX-License-Identifier: Apache-2.0
"""Small entries in SQLite: the contract, and what is special about a database that others may replace."""

import math
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from blake3 import blake3

from tests.support.refusals import unwritable
from tests.support.storage_contract import BUDGET_BYTES, DirectoryPlace, StorageContract, flipped
from tests.support.tiers import LONG_S
from vllm_mmcache.base.errors import StoreUnusable
from vllm_mmcache.storage import sqlite_file
from vllm_mmcache.storage.backend import Backend, Busy, BytesEntry, Usage
from vllm_mmcache.storage.kind import Kind
from vllm_mmcache.storage.record_store import RECORDS
from vllm_mmcache.storage.sqlite import MAX_ENTRY_BYTES, READ_WAIT_S, SqliteBackend
from vllm_mmcache.storage.tier import Tier


class SqlitePlace(DirectoryPlace):
    entry_class = BytesEntry
    a_hit_is_a_use = False
    has_values_at_once = True
    usual_bytes = 500
    overshoot_bytes = 4 * 4096  # pages that a row's places in two indices may need

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

    def folder_of(self, backend: Backend) -> Path:
        assert isinstance(backend, SqliteBackend)
        return backend.folder

    def stranger_paths(self, kind: Kind) -> list[Path]:
        folder = self.store / kind.name
        return [
            folder / "notes.txt",
            folder / f"{kind.name}-v{sqlite_file.FORMAT}-99999999.sqlite",
            folder / f"other-v{sqlite_file.FORMAT}-99999999-0a1b2c3d.sqlite",
            folder / f"{kind.name}-v{sqlite_file.FORMAT + 1}-99999999-0a1b2c3d.sqlite",
        ]

    @contextmanager
    def read_only(self, backend: Backend) -> Iterator[None]:
        backend.close()  # what is open already can be written to
        with unwritable(self.store):
            yield
        backend.close()

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


NAMES = [b"%032d" % number for number in range(20)]
OF_FORMAT_1 = Path(__file__).parent / "data" / "records_of_format_1"
"""The file of records that a version before this format has left."""
NO_DATABASE = b"no database at all" * 400


@pytest.fixture
def place(tmp_path: Path) -> SqlitePlace:
    return SqlitePlace(tmp_path)


@pytest.fixture
def backend(place: SqlitePlace) -> Iterator[SqliteBackend]:
    opened = place.backend(RECORDS)
    yield opened
    opened.close()


def put(backend: SqliteBackend, *numbers: int, content: bytes = b"value") -> Usage:
    return backend.put_many({NAMES[number]: content for number in numbers})


def got(backend: SqliteBackend, number: int) -> bytes | None:
    with backend.open(NAMES[number]) as entry:
        if entry is None:
            return None
        content = bytearray(entry.num_bytes)
        entry.read_into(0, memoryview(content))
        return bytes(content)


def file_of(backend: SqliteBackend) -> Path:
    name = sqlite_file.current(backend.folder)
    assert name is not None
    return backend.folder / name


def files_of(backend: SqliteBackend) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in backend.folder.iterdir()}


def in_use(backend: SqliteBackend) -> list[Path]:
    """The files that hold something: a journal is emptied when its transaction ends."""
    return [path for path in backend.folder.iterdir() if path.stat().st_size]


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_it_is_the_users_alone(backend: SqliteBackend) -> None:
    before = int(time.time())
    put(backend, 0)
    assert backend.folder.stat().st_mode & 0o777 == backend.folder.parent.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in backend.folder.iterdir()} == {0o600}
    with backend.open(NAMES[0]) as entry:
        assert entry is not None
        assert before <= entry.written_s <= time.time()


@pytest.mark.parametrize("planted", ["text", 7, 1.5, b"x" * (MAX_ENTRY_BYTES + 1)])
@pytest.mark.parametrize("written_s", [None, "soon", b"x", 2**62])
def test_rows_that_somebody_else_wrote(
    backend: SqliteBackend, place: SqlitePlace, planted: object, written_s: object
) -> None:
    """No type of a column is sure, nor its length."""
    put(backend, 0, 1)
    values = 7 if written_s is None else written_s
    place.rows(RECORDS, "UPDATE records SET frame = ?, written_s = ? WHERE key = ?", planted, values, NAMES[0])
    place.rows(RECORDS, "INSERT INTO records VALUES ('a text', x'00', 'long ago')")
    assert got(backend, 0) == b""
    assert got(backend, 1) == b"value"
    infos = {info.name: info for info in backend.scan()}
    assert infos.keys() == {*NAMES[:2]}
    assert infos[NAMES[0]].num_bytes == 0
    assert isinstance(infos[NAMES[0]].used_s, int | float)
    put(backend, 0)
    assert got(backend, 0) == b"value"
    backend.sweep()


@pytest.mark.slow
def test_one_changed_bit_of_the_file_is_never_served(tmp_path: Path) -> None:
    """Wherever it is: a miss, or what was put."""
    keys = [blake3(b"%d" % number).digest() for number in range(20)]  # of which none is like another one
    values = dict.fromkeys(keys, b"value" * 20)

    def tier_at(folder: Path) -> Tier:
        return Tier(RECORDS, SqliteBackend(folder, RECORDS, BUDGET_BYTES), rest_s=(0.0, 0.0))

    tier = tier_at(tmp_path / "whole")
    tier.put_many(values)
    tier.close()
    assert isinstance(tier.backend, SqliteBackend)
    whole = file_of(tier.backend)
    assert in_use(tier.backend) == [whole]
    content = whole.read_bytes()
    missed = 0
    for bit in range(0, len(content) * 8, len(content) * 8 // 97):
        folder = tmp_path / str(bit) / "records"
        folder.mkdir(mode=0o700, parents=True)
        (folder / whole.name).write_bytes(flipped(content, bit // 8, bit % 8))
        other = tier_at(folder.parent)
        for key, value in values.items():
            hit = other.get(key, bytes)
            assert hit is None or hit[1] == value
            missed += hit is None
        other.put_many({keys[0]: b"new"})
        hit = other.get(keys[0], bytes)
        assert hit is not None
        assert hit[1] == b"new"
        other.close()
    assert missed


@pytest.mark.parametrize("content", [NO_DATABASE, b"SQLite format 3\0" + b"\xff" * 5000])
@pytest.mark.parametrize("first", ["read", "written"])
def test_a_file_that_is_no_database_is_set_aside(
    backend: SqliteBackend, content: bytes, first: str, log: pytest.LogCaptureFixture
) -> None:
    put(backend, 0)
    backend.close()
    bad = file_of(backend)
    bad.write_bytes(content)
    if first == "read":
        assert got(backend, 0) is None
    put(backend, 1)
    assert [got(backend, number) for number in (0, 1)] == [None, b"value"]
    assert bad.read_bytes() == content
    assert file_of(backend).name > bad.name
    assert len(log.records) == 1
    assert f"set aside {bad}" in log.text
    backend.close()
    second = file_of(backend)  # takes its place
    second.write_bytes(content)
    put(backend, 1, content=b"newer")
    assert got(backend, 1) == b"newer"
    assert {path.name for path in backend.folder.glob("*.sqlite")} == {second.name, file_of(backend).name}


def test_verify_finds_what_reading_does_not(backend: SqliteBackend, place: SqlitePlace) -> None:
    put(backend, *range(20), content=b"value" * 1000)
    assert backend.verify() is None
    backend.close()
    file = file_of(backend)
    content = bytearray(file.read_bytes())
    start = len(content) // 4096 // 2 * 4096
    content[start : start + 4096] = b"\xff" * 4096
    file.write_bytes(content)
    assert backend.verify() == file.name
    assert backend.verify() is None
    assert file_of(backend) != file
    put(backend, 0)
    assert got(backend, 0) == b"value"


def test_damaged_under_an_open_connection(backend: SqliteBackend, place: SqlitePlace) -> None:
    """The pages that SQLite has in memory may still be served."""
    put(backend, 0)
    assert got(backend, 0) == b"value"
    place.age(RECORDS, NAMES[0], 1)  # what is in memory is old
    file_of(backend).write_bytes(b"\xff" * file_of(backend).stat().st_size)
    assert got(backend, 0) in (b"value", None)
    put(backend, 1)
    put(backend, 1)
    assert got(backend, 1) == b"value"


def test_another_user_version_under_our_name_is_set_aside(
    backend: SqliteBackend, log: pytest.LogCaptureFixture
) -> None:
    """Versions have names of their own, so it is no version's."""
    put(backend, 0)
    backend.close()
    bad = file_of(backend)
    with closing(sqlite3.connect(bad)) as connection:
        connection.execute(f"PRAGMA user_version={sqlite_file.FORMAT + 1}")
    assert got(backend, 0) is None
    put(backend, 0)
    assert got(backend, 0) == b"value"
    assert file_of(backend) > bad
    assert "its user_version is" in log.text


def test_another_programs_write_ahead_log_is_not_mapped(backend: SqliteBackend) -> None:
    """Its index is in mapped memory: whoever cuts it off would end the process. Afterwards the file is as before."""
    put(backend, 0)
    backend.close()
    file = file_of(backend)
    with closing(sqlite3.connect(file)) as other:
        assert other.execute("PRAGMA journal_mode=WAL").fetchone() == ("wal",)
        other.execute("INSERT INTO records VALUES (x'00', x'00', 0)")
        other.commit()
        backend._writing_to._wait_s = 0.05
        for work in (lambda: got(backend, 0), lambda: put(backend, 1)):
            with pytest.raises(Busy):
                work()
    put(backend, 1)
    assert (got(backend, 0), got(backend, 1), file_of(backend)) == (b"value", b"value", file)
    with closing(sqlite3.connect(file)) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("delete",)  # what it is without a log


def lay(backend: SqliteBackend) -> dict[str, bytes]:
    """Put the file of another version into the store; returns the files by name."""
    shutil.copytree(OF_FORMAT_1, backend.folder)
    backend.folder.chmod(0o700)
    for path in backend.folder.iterdir():
        os.utime(path)
    return files_of(backend)


def test_versions_have_files_of_their_own(backend: SqliteBackend, log: pytest.LogCaptureFixture) -> None:
    """What another version has written is neither read nor changed, set aside or removed, whoever was first."""
    theirs = lay(backend)
    assert got(backend, 0) is None
    put(backend, 0)
    assert got(backend, 0) == b"value"
    later = file_of(backend).with_name(f"records-v{sqlite_file.FORMAT + 1}-00000007-0a1b2c3d.sqlite")
    later.write_bytes(b"of a format that is not known yet")
    file_of(backend).write_bytes(NO_DATABASE)  # one that is set aside is our own
    put(backend, 0)
    backend.sweep()
    assert got(backend, 0) == b"value"
    assert backend.verify() is None
    backend.close()
    assert theirs.items() | {(later.name, later.read_bytes())} <= files_of(backend).items()
    assert "set aside" in log.text
    assert not any(name in log.text for name in theirs)
    backend.clear()  # `mmcache store clear` leaves nothing
    assert not backend.folder.exists()


def test_files_that_nobody_uses_go_with_time(backend: SqliteBackend, tmp_path: Path) -> None:
    """Of other versions, and those that were set aside; the one in use never goes."""
    (of_format_1,) = lay(backend)
    put(backend, 0)
    damaged = file_of(backend)
    damaged.write_bytes(NO_DATABASE)
    put(backend, 0)
    tidy = SqliteBackend(tmp_path / "store", RECORDS, BUDGET_BYTES, ttl_s=1000)
    former = [backend.folder / of_format_1, damaged]
    tidy.sweep()
    assert all(path.exists() for path in former)
    for path in (*former, damaged.with_name(damaged.name + "-journal"), file_of(backend)):
        age(path, 2000)
    log_of_theirs = backend.folder / (of_format_1 + "-wal")
    log_of_theirs.write_bytes(b"")  # it is being written to
    backend.sweep()  # without a time to live, everything stays
    assert all(path.exists() for path in former)
    tidy.sweep()
    assert [path.exists() for path in former] == [True, False]
    age(log_of_theirs, 2000)
    tidy.sweep()
    assert in_use(backend) == [file_of(backend)]
    assert got(tidy, 0) == b"value"
    tidy.close()


def test_links_and_other_users_files_are_not_opened(backend: SqliteBackend, tmp_path: Path) -> None:
    put(backend, 0)
    (tmp_path / "victim").write_bytes(b"")
    (backend.folder / f"records-v{sqlite_file.FORMAT}-99999999-00000000.sqlite").symlink_to(tmp_path / "victim")
    assert got(backend, 0) == b"value"
    put(backend, 1)
    assert (tmp_path / "victim").read_bytes() == b""
    if os.geteuid() == 0:
        theirs = file_of(backend)
        os.chown(theirs, 12345, -1)
        assert got(backend, 0) is None
        put(backend, 1)
        assert file_of(backend) != theirs
        assert got(backend, 1) == b"value"


def test_pages_are_given_back(backend: SqliteBackend, place: SqlitePlace) -> None:
    for first in range(0, 1000, 100):
        backend.put_many({b"%032d" % number: b"v" * 1000 for number in range(first, first + 100)})
    large_bytes = file_of(backend).stat().st_size
    small = place.backend(RECORDS, budget_bytes=500_000)
    usage = small.sweep()
    assert usage.num_evicted > 500
    assert usage.held_bytes == small.sizes()[1] == file_of(backend).stat().st_size <= 500_000 < large_bytes
    assert small.sweep() == (usage.held_bytes, 0)
    small.close()


def test_a_setting_is_named_where_there_is_no_room(place: SqlitePlace) -> None:
    with pytest.raises(StoreUnusable, match="records_disk_bytes = 1000 has no room for"):
        put(place.backend(RECORDS, budget_bytes=1000), 0)


def test_all_of_a_batch_or_none(backend: SqliteBackend, place: SqlitePlace) -> None:
    put(backend, 0)
    place.rows(
        RECORDS,
        "CREATE TRIGGER no BEFORE INSERT ON records WHEN NEW.frame = x'00' BEGIN SELECT RAISE(ABORT, 'no'); END",
    )
    with pytest.raises(sqlite3.Error):
        backend.put_many({NAMES[1]: b"value", NAMES[2]: b"\0", NAMES[3]: b"value"})
    assert [got(backend, number) for number in range(4)] == [b"value", None, None, None]
    put(backend, 1)
    assert got(backend, 1) == b"value"


def test_a_locked_file_is_waited_for_and_stays(backend: SqliteBackend, place: SqlitePlace) -> None:
    put(backend, 0)
    file = file_of(backend)
    with place.busy(backend):
        for work in (lambda: got(backend, 0), lambda: put(backend, 1), backend.sizes, backend.sweep, backend.verify):
            with pytest.raises(Busy, match="locked"):
                work()
    assert got(backend, 0) == b"value"
    assert file_of(backend) == file


def use_connection(backend: SqliteBackend) -> tuple[threading.Thread, threading.Event]:
    """A thread that works on the connection for reads, until the event is set."""
    begun, go_on = threading.Event(), threading.Event()

    def work(connection: sqlite3.Connection) -> None:
        begun.set()
        assert go_on.wait(LONG_S)

    thread = threading.Thread(target=backend._reading_from.run, args=(work,))
    thread.start()
    assert begun.wait(LONG_S)
    return thread, go_on


def test_work_that_hangs_keeps_no_other(backend: SqliteBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for its connection, once it is known to hang; closing gives up, too."""
    put(backend, 0)
    thread, go_on = use_connection(backend)
    with pytest.raises(Busy, match="in use for 1 s"):
        got(backend, 0)
    backend.close()
    monkeypatch.setattr(backend._reading_from, "_begun", time.monotonic() - 2 * sqlite_file.HUNG_S)
    monkeypatch.setattr(backend._reading_from, "_wait_s", 1e6)  # would wait for ever
    with pytest.raises(Busy, match="in use for 0 s"):
        got(backend, 0)
    put(backend, 1)  # over a connection of its own
    go_on.set()
    thread.join()
    assert backend._reading_from._begun == math.inf  # who comes now waits again
    assert got(backend, 1) == b"value"


def test_a_read_waits_for_others_of_its_process(backend: SqliteBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than for other processes: where threads outnumber cores, one of them may hold the connection so long."""
    monkeypatch.setattr(sqlite_file, "HUNG_S", LONG_S)
    put(backend, 0)
    thread, go_on = use_connection(backend)
    threading.Timer(4 * READ_WAIT_S, go_on.set).start()
    assert got(backend, 0) == b"value"
    assert go_on.is_set()
    thread.join()


def test_a_file_that_has_no_table_yet(backend: SqliteBackend) -> None:
    """Another process has begun it: a miss, and no reason to begin one more."""
    made = sqlite_file.begin(backend.folder)
    assert got(backend, 0) is None
    put(backend, 0)
    assert got(backend, 0) == b"value"
    assert file_of(backend).name == made


def test_what_was_cleared_takes_no_room(backend: SqliteBackend) -> None:
    """A file that is open takes it also after it was removed."""
    put(backend, 0)
    assert got(backend, 0) == b"value"

    def is_open() -> bool:
        places = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
        return any(place.startswith(str(backend.folder)) for place in places)

    assert is_open()
    backend.clear()
    assert not is_open()
