# SPDX-License-Identifier: Apache-2.0
"""The file of records: several processes, its budget, and everything that can be wrong with it."""

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_mmcache import records
from vllm_mmcache.records import database
from vllm_mmcache.records.database import MOST_WAL_BYTES
from vllm_mmcache.records.disk import DiskPlace
from vllm_mmcache.records.framing import frame
from vllm_mmcache.records.ram import Entry

BUDGET_BYTES = 2 * 1024**2
KEYS = [records.key("test", str(number)) for number in range(20)]

MANY = """
import sys
from vllm_mmcache import records
from vllm_mmcache.records import disk
from vllm_mmcache.records.disk import DiskPlace
disk.READ_WAIT_S = disk.WRITE_WAIT_S = 60.0  # for the others, however busy the machine is
place = DiskPlace(sys.argv[1], 64 * 1024**2)
for number in range(300):
    place.save({records.key("of", sys.argv[2], str(number)): sys.argv[2].encode() * 100})
    assert place.get(records.key("of", sys.argv[2], str(number))) is not None
assert not place.counts.snapshot()["errors"], place.counts.snapshot()
"""

ENDING = """
import sys
from vllm_mmcache import records, settings
settings.use(settings.Settings(store=sys.argv[1]))
for number in range(500):
    records.current().put(records.key("a", str(number)), b"value")
"""

FORKED = """
import os, sys
from vllm_mmcache import records, settings
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


def test_one_changed_bit_of_the_file_is_never_served(place: DiskPlace, tmp_path: Path) -> None:
    """Wherever it is: a miss, or what was put."""
    place.save(dict.fromkeys(KEYS, b"value" * 20))
    place.close()
    whole = file_of(place)
    assert not whole.with_name(whole.name + "-wal").exists()
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
    for path in (file, file.with_name(file.name + "-wal")):
        if path.exists():
            path.write_bytes(b"\xff" * path.stat().st_size)
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


def test_another_format_is_left_alone(place: DiskPlace, tmp_path: Path) -> None:
    place.save({KEYS[0]: b"value"})
    place.close()
    connection = sqlite3.connect(file_of(place))
    connection.execute("PRAGMA user_version=2")
    connection.close()
    file = file_of(place)
    assert place.get(KEYS[0]) is None
    place.save({KEYS[0]: b"value"})
    assert file_of(place) == file
    counts = place.counts.snapshot()
    assert (counts["errors"], counts["dropped"]) == (2, 1)


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
    assert sum(path.stat().st_size for path in place.folder.iterdir()) <= BUDGET_BYTES + MOST_WAL_BYTES


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


def test_several_processes(tmp_path: Path) -> None:
    running = [run(MANY, str(tmp_path / "store"), name) for name in ("a", "b", "c")]
    for one in running:
        _, said = one.communicate(timeout=120)
        assert one.returncode == 0, said
    assert place_at(tmp_path).sizes()[0] == 900


def test_a_fork_has_connections_of_its_own(tmp_path: Path) -> None:
    forked = run(FORKED, str(tmp_path / "store"))
    _, said = forked.communicate(timeout=60)
    assert forked.returncode == 0, said
    place = place_at(tmp_path)
    assert [value_of(place.get(records.key(name))) for name in "abc"] == [b"before", b"of the child", b"after"]
    assert place.check() == (3, 0, None)


def test_what_is_waiting_is_written_when_the_process_ends(tmp_path: Path) -> None:
    ending = run(ENDING, str(tmp_path / "store"))
    _, said = ending.communicate(timeout=60)
    assert (ending.returncode, said) == (0, "")
    assert len(list((tmp_path / "store" / "records").iterdir())) == 1  # SQLite has let go of it
    assert place_at(tmp_path).check() == (500, 0, None)


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
