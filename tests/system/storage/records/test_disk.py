# SPDX-License-Identifier: Apache-2.0
"""The file of records: several processes, its budget, and everything that can be wrong with it."""

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from vllm_mmcache.storage.records import database
from vllm_mmcache.storage.records.disk import DiskPlace
from vllm_mmcache.storage.records.ram import Entry

from vllm_mmcache.storage import records
from vllm_mmcache.storage.frame import frame

BUDGET_BYTES = 2 * 1024**2
KEYS = [records.key("test", str(number)) for number in range(20)]

MANY = """
import sys
from vllm_mmcache.storage import records
from vllm_mmcache.storage.records import disk
from vllm_mmcache.storage.records.disk import DiskPlace
disk.READ_WAIT_S = disk.WRITE_WAIT_S = 60.0  # for the others, however busy the machine is
place = DiskPlace(sys.argv[1], 64 * 1024**2)
for number in range(300):
    place.save({records.key("of", sys.argv[2], str(number)): sys.argv[2].encode() * 100})
    assert place.get(records.key("of", sys.argv[2], str(number))) is not None
assert not place.counts.snapshot()["errors"], place.counts.snapshot()
"""

SPOILED = """
import sys
from vllm_mmcache.storage import records
from vllm_mmcache.storage.records.disk import DiskPlace
place = DiskPlace(sys.argv[1], 1024**2, rest_s=0.0)
key, value = records.key("a"), b"value" * 100
for line in sys.stdin:  # one for each time that its files were spoiled
    for number in range(20):
        place.save({key: value, records.key("b", str(number)): value})
        found = place.get(key)
        assert found is None or found.value == value
    print(place.get(key) is not None, flush=True)
"""

ENDING = """
import sys
from vllm_mmcache.base import settings
from vllm_mmcache.storage import records
settings.use(settings.Settings(store=sys.argv[1]))
for number in range(500):
    records.current().put(records.key("a", str(number)), b"value")
"""

FORKED = """
import os, sys
from vllm_mmcache.base import settings
from vllm_mmcache.storage import records
settings.use(settings.Settings(store=sys.argv[1]))
records.current().put(records.key("a"), b"before")
assert records.current().flush(60)
parent = records.current()
child = os.fork()
if child == 0:
    assert records.current() is not parent
    assert records.current().get(records.key("a")) == b"before"
    assert parent._below[0].get(records.key("a")).value == b"before"  # a connection of its own, too
    records.current().put(records.key("b"), b"of the child")
    assert records.current().close(60)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert records.current() is parent
assert records.current().get(records.key("b")) == b"of the child"
records.current().put(records.key("c"), b"after")
assert records.current().close(60)
assert parent.counts()["disk"]["errors"] == 0
"""


def run(code: str, *args: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", code, *args], stderr=subprocess.PIPE, text=True)


def place_at(folder: Path, budget_bytes: int = BUDGET_BYTES) -> DiskPlace:
    return DiskPlace(folder / "store", budget_bytes, rest_s=0.0)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[DiskPlace]:
    opened = place_at(tmp_path)
    yield opened
    opened.close()


def value_of(entry: Entry | None) -> bytes | None:
    return entry and entry.value


def file_of(place: DiskPlace) -> Path:
    name = database.current(place.folder)
    assert name is not None
    return place.folder / name


def in_use(folder: Path) -> list[Path]:
    """The files that hold something: a journal is emptied when its transaction ends."""
    return [path for path in folder.iterdir() if path.stat().st_size]


def change(place: DiskPlace, statement: str, *values: object) -> None:
    """As another program would."""
    with sqlite3.connect(file_of(place)) as connection:
        assert connection.execute(statement, values).rowcount == 1
    connection.close()


def test_kept_for_the_next_process(place: DiskPlace, tmp_path: Path) -> None:
    assert place.get(KEYS[0]) is None
    before = time.time()
    place.save({KEYS[0]: b"one", KEYS[1]: b""})
    place.save({KEYS[0]: b"another"})
    place.close()
    again = place_at(tmp_path)
    found = again.get(KEYS[0])
    assert found is not None
    assert found.value == b"another"
    assert before - 1 <= found.renewed_s <= time.time()
    assert value_of(again.get(KEYS[1])) == b""
    assert again.get(KEYS[2]) is None
    assert again.counts.snapshot() == {"hits": 2, "misses": 1, "saved": 0, "corrupt": 0, "dropped": 0, "errors": 0}


def test_it_is_the_users_alone(place: DiskPlace, tmp_path: Path) -> None:
    place.save({KEYS[0]: b"one"})
    assert place.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in place.folder.iterdir()} == {0o600}
    place.folder.rename(tmp_path / "elsewhere")
    place.folder.symlink_to(tmp_path / "elsewhere")
    assert place.get(KEYS[0]) is None
    assert place_at(tmp_path).get(KEYS[0]) is None
    assert place.counts.snapshot()["errors"] == 1


@pytest.mark.parametrize(
    "planted",
    [
        frame(KEYS[1], b"value"),
        frame(KEYS[0], b"value")[:-1],
        frame(KEYS[0], b"value")[:20],
        b"mmcr\x02" + frame(KEYS[0], b"value")[5:],
        b"",
        "text",
        7,
    ],
)
def test_what_is_no_whole_record_of_the_key_is_a_miss(place: DiskPlace, planted: object) -> None:
    place.save({KEYS[0]: b"value", KEYS[1]: b"other"})
    change(place, "UPDATE records SET frame = ? WHERE key = ?", planted, KEYS[0])
    assert place.get(KEYS[0]) is None
    assert value_of(place.get(KEYS[1])) == b"other"
    assert place.counts.snapshot()["corrupt"] == 1
    place.save({KEYS[0]: b"value"})
    assert value_of(place.get(KEYS[0])) == b"value"


@pytest.mark.slow
def test_one_changed_bit_of_the_file_is_never_served(place: DiskPlace, tmp_path: Path) -> None:
    """Wherever it is: a miss, or what was put."""
    place.save(dict.fromkeys(KEYS, b"value" * 20))
    place.close()
    whole = file_of(place)
    assert in_use(place.folder) == [whole]
    content = whole.read_bytes()
    missed = 0
    for number in range(0, len(content) * 8, len(content) * 8 // 97):
        folder = tmp_path / str(number)
        other = place_at(folder)
        other.folder.mkdir(mode=0o700, parents=True)
        other.folder.chmod(0o700)
        changed = bytearray(content)
        changed[number // 8] ^= 1 << number % 8
        (other.folder / whole.name).write_bytes(changed)
        for key in KEYS:
            found = value_of(other.get(key))
            assert found in (b"value" * 20, None)
            missed += found is None
        other.save({KEYS[0]: b"new"})
        assert value_of(other.get(KEYS[0])) == b"new"
        other.close()
    assert missed


@pytest.mark.parametrize("content", [b"no database at all" * 400, b"SQLite format 3\0" + b"\xff" * 5000])
@pytest.mark.parametrize("first", ["get", "save"])
def test_a_file_that_is_no_database_is_set_aside(
    place: DiskPlace, content: bytes, first: str, log: pytest.LogCaptureFixture
) -> None:
    place.save({KEYS[0]: b"value"})
    place.close()
    bad = file_of(place)
    bad.write_bytes(content)
    if first == "get":
        assert place.get(KEYS[0]) is None
    place.save({KEYS[1]: b"new"})
    assert value_of(place.get(KEYS[1])) == b"new"
    assert bad.read_bytes() == content
    assert file_of(place).name > bad.name
    assert len(log.records) == 1
    assert "set aside" in log.text
    # The one after it takes its place.
    place.close()
    second = file_of(place)
    second.write_bytes(content)
    place.save({KEYS[1]: b"newer"})
    assert value_of(place.get(KEYS[1])) == b"newer"
    assert {path.name for path in place.folder.glob("*.sqlite")} == {second.name, file_of(place).name}


def test_damaged_under_an_open_connection(place: DiskPlace) -> None:
    """The pages that SQLite has in memory may still be served; what comes from the file is checked."""
    place.save({KEYS[0]: b"value"})
    assert value_of(place.get(KEYS[0])) == b"value"
    change(place, "UPDATE records SET written_s = 1 WHERE key = ?", KEYS[0])  # what is in memory is old
    file = file_of(place)
    file.write_bytes(b"\xff" * file.stat().st_size)
    assert value_of(place.get(KEYS[0])) in (b"value", None)
    place.save({KEYS[1]: b"new"})
    place.save({KEYS[1]: b"new"})
    assert value_of(place.get(KEYS[1])) == b"new"


def test_removed_under_an_open_connection(place: DiskPlace, tmp_path: Path) -> None:
    place.save({KEYS[0]: b"value"})
    other = place_at(tmp_path)
    assert value_of(other.get(KEYS[0])) == b"value"
    assert place.remove() >= 1
    assert not place.folder.exists()
    for one in (place, other):
        assert one.get(KEYS[0]) is None
    other.save({KEYS[1]: b"new"})
    assert value_of(place.get(KEYS[1])) == b"new"
    shutil.rmtree(tmp_path / "store")
    assert place.get(KEYS[1]) is None
    place.save({KEYS[2]: b"newest"})
    assert value_of(other.get(KEYS[2])) == b"newest"
    assert other.counts.snapshot()["errors"] == place.counts.snapshot()["errors"] == 0


STORES = Path(__file__).parent / "stores"
"""Records as earlier versions have left them, in the folder of their format."""


def lay(name: str, place: DiskPlace) -> dict[str, bytes]:
    """Put the files of another version of mmcache into a store; returns them by name."""
    shutil.copytree(STORES / name, place.folder)
    place.folder.chmod(0o700)
    for path in place.folder.iterdir():
        os.utime(path)
    return files_of(place)


def files_of(place: DiskPlace) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.folder.iterdir()}


def test_versions_have_files_of_their_own(place: DiskPlace, log: pytest.LogCaptureFixture) -> None:
    """What another version has written is neither read nor changed, set aside or removed, whoever was first."""
    theirs = lay("format-1", place)
    assert place.get(KEYS[0]) is None
    place.save({KEYS[0]: b"value"})
    assert value_of(place.get(KEYS[0])) == b"value"
    file_of(place).write_bytes(b"no database at all" * 400)  # one that is set aside is our own
    place.save({KEYS[0]: b"value"})
    place.sweep()
    assert place.check() == (1, 0, None)
    place.close()
    assert theirs.items() <= files_of(place).items()
    assert "set aside" in log.text
    assert not any(name in log.text for name in theirs)
    counts = place.counts.snapshot()
    assert (counts["errors"], counts["dropped"], counts["corrupt"]) == (0, 0, 0)


def test_a_version_after_this_one_has_files_of_its_own(place: DiskPlace) -> None:
    place.save({KEYS[0]: b"value"})
    later = file_of(place).with_name(f"records-v{database.FORMAT + 1}-00000007-0a1b2c3d.sqlite")
    later.write_bytes(b"of a format that is not known yet")
    assert value_of(place.get(KEYS[0])) == b"value"
    file_of(place).write_bytes(b"no database at all" * 400)
    place.save({KEYS[0]: b"value"})
    assert later.read_bytes() == b"of a format that is not known yet"
    place.remove()  # `mmcache store clear` leaves nothing
    assert not place.folder.exists()


def test_files_of_other_versions_go_when_nobody_uses_them(place: DiskPlace, tmp_path: Path) -> None:
    theirs = lay("format-1", place)
    place.save({KEYS[0]: b"value"})
    tidy = DiskPlace(tmp_path / "store", BUDGET_BYTES, ttl_s=1000)
    tidy.sweep()
    assert theirs.keys() <= files_of(place).keys()
    (name,) = theirs
    os.utime(place.folder / name, (time.time() - 2000,) * 2)
    log_of_theirs = place.folder / (name + "-wal")
    log_of_theirs.write_bytes(b"")  # it is being written to
    tidy.sweep()
    assert theirs.keys() <= files_of(place).keys()
    os.utime(log_of_theirs, (time.time() - 2000,) * 2)
    tidy.sweep()
    assert in_use(place.folder) == [file_of(place)]
    assert value_of(tidy.get(KEYS[0])) == b"value"


def test_another_user_version_under_our_name_is_set_aside(place: DiskPlace, log: pytest.LogCaptureFixture) -> None:
    """Versions have names of their own, so it is no version's."""
    place.save({KEYS[0]: b"value"})
    place.close()
    bad = file_of(place)
    connection = sqlite3.connect(bad)
    connection.execute(f"PRAGMA user_version={database.FORMAT + 1}")
    connection.close()
    assert place.get(KEYS[0]) is None
    place.save({KEYS[0]: b"value"})
    assert value_of(place.get(KEYS[0])) == b"value"
    assert file_of(place) > bad
    assert "its user_version is" in log.text


SPOIL: dict[str, Callable[[Path], object]] = {
    "cut to nothing": lambda path: os.truncate(path, 0),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "removed": lambda path: path.unlink(),
    "garbled": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
    "replaced": lambda path: (path.unlink(), path.write_bytes(b"x" * 40_000)),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.process
@pytest.mark.parametrize("how", SPOIL)
def test_no_spoiled_file_ends_a_process(how: str, tmp_path: Path) -> None:
    """Whatever happens to any file of the folder while it is in use: records are missed, and kept again later."""
    code = [sys.executable, "-c", SPOILED, str(tmp_path / "store")]
    process = subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    spoiled = set()
    for number in range(30):
        process.stdin.write("go\n")
        process.stdin.flush()
        if number % 2:  # while it is reading and writing, else between
            time.sleep(0.002)
        else:
            assert process.stdout.readline() == "True\n", process.communicate()[1]
        for path in sorted((tmp_path / "store" / "records").glob("*")):
            with suppress(FileNotFoundError, IsADirectoryError, PermissionError):
                SPOIL[how](path)
                spoiled.add(path.name.partition(".sqlite")[2])
        if number % 2:
            assert process.stdout.readline(), process.communicate()[1]
        for path in (tmp_path / "store" / "records").glob("*"):
            if path.is_dir():
                path.rmdir()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "" in spoiled


@pytest.mark.slow
def test_written_longest_ago_goes_first(place: DiskPlace) -> None:
    value = b"v" * 1000
    for number in range(100):
        place.save({records.key("fill", str(number), str(one)): value for one in range(50)})
        place.save({KEYS[0]: b"used"})  # as the renewal of what is used does
        change(place, "UPDATE records SET written_s = ? WHERE key = ?", 2**40 + number, KEYS[0])
        assert place.sizes()[1] <= BUDGET_BYTES
    assert value_of(place.get(KEYS[0])) == b"used"
    assert place.get(records.key("fill", "0", "0")) is None
    assert place.get(records.key("fill", "99", "0")) is not None
    num_records, held_bytes = place.sizes()
    assert BUDGET_BYTES * 0.8 < held_bytes <= BUDGET_BYTES
    assert 1000 < num_records < 2000
    place.close()
    assert sum(path.stat().st_size for path in place.folder.iterdir()) <= BUDGET_BYTES


def test_a_smaller_budget_is_kept_by_sweep(place: DiskPlace, tmp_path: Path) -> None:
    place.save({records.key("fill", str(number)): b"v" * 1000 for number in range(1000)})
    held_bytes, evicted = place_at(tmp_path, 500_000).sweep()
    assert evicted
    assert held_bytes <= 500_000
    assert file_of(place).stat().st_size <= 500_000
    assert place_at(tmp_path, 500_000).sweep() == (held_bytes, 0)


def test_a_budget_for_nothing(place: DiskPlace, tmp_path: Path) -> None:
    tiny = place_at(tmp_path, 1000)
    tiny.save({KEYS[0]: b"value"})
    assert tiny.get(KEYS[0]) is None
    assert tiny.counts.snapshot()["dropped"] == 1


@pytest.mark.process
def test_several_processes(tmp_path: Path) -> None:
    running = [run(MANY, str(tmp_path / "store"), name) for name in ("a", "b", "c")]
    for one in running:
        _, said = one.communicate(timeout=120)
        assert one.returncode == 0, said
    assert place_at(tmp_path).sizes()[0] == 900


@pytest.mark.process
def test_a_fork_has_connections_of_its_own(tmp_path: Path) -> None:
    forked = run(FORKED, str(tmp_path / "store"))
    _, said = forked.communicate(timeout=60)
    assert forked.returncode == 0, said
    place = place_at(tmp_path)
    assert [value_of(place.get(records.key(name))) for name in "abc"] == [b"before", b"of the child", b"after"]
    assert place.check() == (3, 0, None)


@pytest.mark.process
def test_what_is_waiting_is_written_when_the_process_ends(tmp_path: Path) -> None:
    ending = run(ENDING, str(tmp_path / "store"))
    _, said = ending.communicate(timeout=60)
    assert (ending.returncode, said) == (0, "")
    assert len(in_use(tmp_path / "store" / "records")) == 1  # SQLite has let go of it
    assert place_at(tmp_path).check() == (500, 0, None)


@pytest.mark.process
def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    writer = run(MANY, str(tmp_path / "store"), "a")
    place = place_at(tmp_path)
    until = time.monotonic() + 60
    while place.get(records.key("of", "a", "20")) is None:
        assert time.monotonic() < until
    writer.kill()
    writer.communicate()
    assert value_of(place.get(records.key("of", "a", "0"))) == b"a" * 100
    num_good, num_bad, set_aside = place.check()
    assert num_good > 20
    assert (num_bad, set_aside) == (0, None)


def test_a_locked_file_is_a_miss_in_time(place: DiskPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever holds SQLite's exclusive lock keeps no request waiting, and is no reason to set the file aside."""
    place.save({KEYS[0]: b"value"})
    place.close()
    file = file_of(place)
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("PRAGMA locking_mode=EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr(place._writing_to, "_wait_s", 0.01)
    assert place.get(KEYS[0]) is None
    place.save({KEYS[1]: b"new"})
    assert place.counts.snapshot()["dropped"] == 1
    other.execute("COMMIT")
    other.close()
    assert value_of(place.get(KEYS[0])) == b"value"
    assert file_of(place) == file


def test_a_read_that_hangs_keeps_no_other_one(place: DiskPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    place.save({KEYS[0]: b"value"})
    begun, go_on = threading.Event(), threading.Event()

    def hang(connection: sqlite3.Connection) -> None:
        begun.set()
        assert go_on.wait(60)

    thread = threading.Thread(target=place._reading_from.run, args=(hang,))
    thread.start()
    assert begun.wait(60)
    assert place.get(KEYS[0]) is None
    monkeypatch.setattr(place._reading_from, "_begun", time.monotonic() - 2 * database.HUNG_S)
    monkeypatch.setattr(place._reading_from, "_wait_s", 1e6)  # would wait for ever
    assert place.get(KEYS[0]) is None
    go_on.set()
    thread.join()
    assert value_of(place.get(KEYS[0])) == b"value"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_is_read_only(place: DiskPlace, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o500)
    place.save({KEYS[0]: b"value"})
    assert place.get(KEYS[0]) is None


def test_a_file_in_the_place_of_the_directory(place: DiskPlace, tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(b"")
    place.save({KEYS[0]: b"value"})
    assert place.get(KEYS[0]) is None
    assert place.counts.snapshot()["dropped"] == 1
