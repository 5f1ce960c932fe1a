# SPDX-License-Identifier: Apache-2.0
"""The disk tier in one process: budget, order of eviction, and files that are no whole package."""

import fcntl
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm_mmcache.components.features.directory import OpenFile
from vllm_mmcache.components.features.disk import DiskTier
from vllm_mmcache.components.features.lasting import HUNG_S, PIECE_BYTES

from tests.support.packages import BUDGET_BYTES, SHAPE, features, held_bytes, identity, load, packed, save
from tests.support.tiers import LONG_S
from tests.unit.components.features.test_package import HOSTILE
from vllm_mmcache.components.features import directory, lasting
from vllm_mmcache.components.features.package import FORMAT, Shape, pack

PACKED_BYTES = len(packed())
LARGE = Shape(4096, 1536, "bfloat16")  # three pieces


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who wait for the lock beside others get it, also on a busy machine."""
    monkeypatch.setattr(directory, "LOCK_S", LONG_S)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Holds by how many seconds a tier's clock goes ahead; the test says when time passes."""
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(lasting, "time", clock)
    return ahead


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "store", BUDGET_BYTES)


def put(tier: DiskTier, number: int, shape: Shape = SHAPE) -> Path:
    assert save(tier, number, shape)
    return tier.directory.path_of(identity(number).key)


def has(tier: DiskTier, number: int) -> bool:
    return os.path.lexists(tier.directory.path_of(identity(number).key))


def test_a_package_outlives_the_process(tier: DiskTier, tmp_path: Path) -> None:
    assert load(tier, 0) is None  # no directory yet
    put(tier, 0)
    again = DiskTier(tmp_path / "store", BUDGET_BYTES)
    assert load(again, 0) == features(0)
    assert load(again, 1) is None
    counts = again.counters.snapshot()
    assert (counts["hits"], counts["misses"], counts["errors"]) == (1, 1, 0)


def test_nobody_else_may_look(tier: DiskTier, tmp_path: Path) -> None:
    path = put(tier, 0)
    assert path.stat().st_mode & 0o777 == 0o600
    folders = [tmp_path / "store", tier.directory.root, path.parent]
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


def test_a_link_in_the_place_of_the_directory_is_not_trusted(tier: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    put(tier, 0)
    root = tier.directory.root
    root.rename(root.parent / "elsewhere")
    root.symlink_to(root.parent / "elsewhere")
    assert load(tier, 0) is None
    assert load(tier, 0) is None
    assert not save(tier, 1)
    assert tier.counters.snapshot()["errors"] == 2  # one read, one write, then left alone
    assert all("expected a directory drwx------" in record.message for record in caplog.records)
    assert len(caplog.records) == 2


@pytest.mark.slow
def test_never_above_the_budget(tmp_path: Path) -> None:
    """1,000 packages against 50 MiB."""
    budget = 50 * 1024**2
    tier = DiskTier(tmp_path, budget)
    peak = 0
    for number in range(1000):
        assert save(tier, number, Shape(512, 128, "bfloat16"))
        if number % 10 == 0:
            peak = max(peak, held_bytes(tmp_path))
    counts = tier.counters.snapshot()
    assert 0.8 * budget < peak <= budget
    assert counts["held_bytes"] == held_bytes(tmp_path) <= budget
    assert counts["saved"] == 1000
    assert counts["evictions"] + len(list(tier.directory.packages())) == 1000
    assert has(tier, 999)
    assert not has(tier, 0)


def test_the_one_used_longest_ago_goes_first(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 10 * PACKED_BYTES)
    for number in range(10):
        os.utime(put(tier, number), (1000 + number, 1000 + number))
    assert load(tier, 0) is not None  # now used last
    put(tier, 10)
    kept = [has(tier, number) for number in range(11)]
    assert kept[0]
    assert kept[10]
    assert kept[1:10] == sorted(kept[1:10])  # the older ones are gone, the newer ones are there
    assert not kept[1]


def test_a_smaller_budget_holds_after_the_next_write(tmp_path: Path) -> None:
    for number in range(10):
        put(DiskTier(tmp_path, 20 * PACKED_BYTES), number)
    put(DiskTier(tmp_path, 6 * PACKED_BYTES), 10)
    assert held_bytes(tmp_path) <= 6 * PACKED_BYTES


def test_one_package_has_a_quarter_of_the_budget_at_most(tmp_path: Path) -> None:
    for budget_bytes, kept in ((4 * SHAPE.num_bytes, True), (4 * SHAPE.num_bytes - 1, False)):
        tier = DiskTier(tmp_path / str(kept), budget_bytes)
        assert save(tier, 0) == kept
        assert load(tier, 0) == (features(0) if kept else None)
        assert tier.counters.snapshot()["dropped"] == (not kept)


def test_a_package_that_is_there_is_not_written_again(tier: DiskTier) -> None:
    path = put(tier, 0)
    os.utime(path, (1000, 1000))
    inode = path.stat().st_ino
    put(tier, 0)
    assert path.stat().st_ino == inode
    assert path.stat().st_mtime > 1000
    assert tier.counters.snapshot()["saved"] == 1


@pytest.mark.slow
def test_eighty_mebibytes(tmp_path: Path) -> None:
    shape = Shape(16384, 2560, "bfloat16")
    tier = DiskTier(tmp_path, 10 * 1024**3)
    put(tier, 0, shape)
    assert load(tier, 0, shape) == features(0, shape)
    assert tier.counters.snapshot()["read_bytes"] == shape.num_bytes == 80 * 1024**2


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    packed = bytearray(path.read_bytes())
    packed[-5] ^= 1
    path.write_bytes(packed)


def older(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(FORMAT.encode(), b"vllm-mmcache features 1"))


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


OTHER = Shape(16, 32, "float32")  # as many bytes
SPOILS: list[Callable[[Path], object]] = [
    truncate,
    flip,
    older,
    link,
    folder,
    pipe,
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(b"\x89PNG foreign" * 100),
    lambda path: path.write_bytes(pack(identity("other"), SHAPE, features())),
    lambda path: path.write_bytes(pack(identity(), OTHER, features(0, OTHER))),
    lambda path: path.write_bytes((2**20 + 8).to_bytes(8, "little") + b"{" * 2**21),
    lambda path: path.write_bytes(path.read_bytes() + b"x"),
    lambda path: os.truncate(path, BUDGET_BYTES + 1),
]
NAMES = [
    *("truncated", "bit flipped", "older version", "link", "folder", "pipe", "empty", "foreign", "renamed"),
    *("another shape", "long header", "longer", "huge"),
]


@pytest.mark.parametrize("spoil", SPOILS, ids=NAMES)
def test_a_file_that_is_no_whole_package_is_a_miss_and_set_aside(
    tier: DiskTier, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    path = put(tier, 0)
    spoil(path)
    assert load(tier, 0) is None
    assert not os.path.lexists(path)
    assert os.path.lexists(tier.directory.root / "aside" / path.name)
    assert load(tier, 0) is None  # a plain miss now
    counts = tier.counters.snapshot()
    assert (counts["hits"], counts["misses"], counts["set_aside"], counts["errors"]) == (0, 2, 1, 0)
    assert "set aside" in caplog.text
    put(tier, 0)  # the tower ran again
    assert load(tier, 0) == features(0)


@pytest.mark.slow
def test_what_is_set_aside_is_bounded_and_counts(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 100 * PACKED_BYTES)
    for number in range(60):
        flip(put(tier, number))
        assert load(tier, number) is None
    assert len(list(tier.directory.aside())) == 16
    for number in range(100, 250):
        put(tier, number)
    assert held_bytes(tmp_path) <= 100 * PACKED_BYTES
    assert not list(tier.directory.aside())  # the first to go


def test_a_store_removed_under_way_is_made_again(tier: DiskTier) -> None:
    put(tier, 0)
    shutil.rmtree(tier.directory.root.parent)
    assert load(tier, 0) is None
    put(tier, 0)
    assert load(tier, 0) == features(0)
    assert tier.counters.snapshot()["errors"] == 0


@pytest.mark.parametrize("account", [b"", b"garbage", b"-1\n", b"0" * 20 + b"\n", b"9" * 20 + b"\n"])
def test_a_wrong_account_is_corrected(tmp_path: Path, account: bytes) -> None:
    for number in range(10):
        put(DiskTier(tmp_path, 100 * PACKED_BYTES), number)
    (tmp_path / "features" / "lock").write_bytes(account)
    tier = DiskTier(tmp_path, 6 * PACKED_BYTES)
    put(tier, 10)
    assert tier.counters.snapshot()["held_bytes"] == held_bytes(tmp_path) <= 6 * PACKED_BYTES


def test_files_that_are_not_ours_are_left_alone(tier: DiskTier) -> None:
    path = put(tier, 0)
    strangers = [tier.directory.root / "notes.txt", path.parent / "notes.txt", path.parent / f"{path.name}.bak"]
    for stranger in strangers:
        stranger.write_text("mine")
    assert tier.directory.clear() == 1
    assert [stranger.read_text() for stranger in strangers] == ["mine"] * 3


@pytest.mark.parametrize("content_id", HOSTILE)
def test_a_hostile_content_id_reaches_no_path(tier: DiskTier, tmp_path: Path, content_id: str) -> None:
    asked = replace(identity(), identifier=content_id)
    assert tier.save(asked, SHAPE, features())
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]
    assert [path.name for path in files] == [f"{asked.key}.safetensors"]


def during(monkeypatch: pytest.MonkeyPatch, what: Callable[[int], object]) -> None:
    """Run `what` before each read of a file, with the offset."""
    read_into = OpenFile.read_into

    def instead(self: OpenFile, offset: int, buffer: memoryview, until: float = 0.0) -> None:
        what(offset)
        read_into(self, offset, buffer, until)

    monkeypatch.setattr(OpenFile, "read_into", instead)


def test_a_file_truncated_while_it_is_read(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tier, 0, LARGE)
    with monkeypatch.context() as patch:
        during(patch, lambda offset: os.truncate(path, 2 * PIECE_BYTES) if offset > PIECE_BYTES else None)
        assert load(tier, 0, LARGE) is None
    counts = tier.counters.snapshot()
    assert (counts["misses"], counts["set_aside"], counts["errors"]) == (1, 1, 0)
    put(tier, 0, LARGE)
    assert load(tier, 0, LARGE) == features(0, LARGE)


def test_a_file_spoiled_and_replaced_while_it_is_read(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies there now is another file, of which nothing bad is known."""
    path = put(tier, 0, LARGE)

    def spoil_and_replace(offset: int) -> None:
        if offset > PIECE_BYTES and not path.with_suffix(".new").exists():
            whole = path.read_bytes()
            os.truncate(path, 2 * PIECE_BYTES)
            path.rename(path.with_suffix(".new"))
            path.write_bytes(whole)

    with monkeypatch.context() as patch:
        during(patch, spoil_and_replace)
        assert load(tier, 0, LARGE) is None
    assert tier.counters.snapshot()["set_aside"] == 0
    assert load(tier, 0, LARGE) == features(0, LARGE)


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_file_that_goes_while_it_is_read_is_read_to_its_end(
    tier: DiskTier, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tier, 0, LARGE)
    other = path.with_suffix(".other")
    other.write_bytes(b"of another writer")
    with monkeypatch.context() as patch:
        during(
            patch, lambda offset: (os.rename(other, path) if how == "replaced" else path.unlink()) if not offset else 0
        )
        assert load(tier, 0, LARGE) == features(0, LARGE)


def test_no_room_is_a_miss_and_the_file_stays(tier: DiskTier) -> None:
    path = put(tier, 0)
    assert not tier.load(identity(0), SHAPE, lambda: None, time.monotonic() + 60)
    counts = tier.counters.snapshot()
    assert (counts["misses"], counts["dropped"], counts["set_aside"], counts["errors"]) == (1, 1, 0, 0)
    assert path.exists()


def test_no_room_is_asked_for_where_nothing_fits(tier: DiskTier) -> None:
    flip_head = bytearray(packed())
    flip_head[20] ^= 1
    put(tier, 0).write_bytes(flip_head)
    for number in (0, 1):
        assert not tier.load(identity(number), SHAPE, lambda: pytest.fail("asked"), time.monotonic() + 60)


def test_the_end_of_time_is_looked_at_between_pieces(
    tier: DiskTier, later: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tier, 0, LARGE)
    assert load(tier, 0, LARGE, seconds=-1) is None
    assert tier.counters.snapshot()["errors"] == 0  # nothing was tried
    offsets: list[int] = []

    def takes_long(offset: int) -> None:
        offsets.append(offset)
        later[0] = 1000.0 if offset else 0.0

    with monkeypatch.context() as patch:
        during(patch, takes_long)
        assert load(tier, 0, LARGE) is None
    later[0] = 0.0
    assert len(offsets) == 2  # the head, and one piece of three
    counts = tier.counters.snapshot()
    assert (counts["misses"], counts["errors"], counts["set_aside"]) == (2, 1, 0)
    assert not tier.resting()
    assert load(tier, 0, LARGE) == features(0, LARGE)


def test_a_disk_that_hangs_takes_one_thread(
    tier: DiskTier, later: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tier, 0)
    put(tier, 1)
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(offset: int) -> None:
        hangs.set()
        goes_on.wait(LONG_S)

    with monkeypatch.context() as patch:
        during(patch, hang)
        thread = threading.Thread(target=load, args=(tier, 0), kwargs={"seconds": 1000})
        thread.start()
        assert hangs.wait(LONG_S)
    assert load(tier, 1) == features(1)  # one load holds up no other
    later[0] = 1000.0 + HUNG_S
    assert tier.resting()
    assert load(tier, 1, seconds=5000) is None
    assert save(tier, 2)
    goes_on.set()
    thread.join()
    assert not tier.resting()
    assert load(tier, 1, seconds=5000) == features(1)


def test_a_bug_of_ours_is_logged_and_reaches_nobody(tier: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    put(tier, 0)
    assert not tier.load(identity(0), SHAPE, lambda: memoryview(bytes(1 // 0)), time.monotonic() + 60)
    assert not tier.save(identity(1), SHAPE, features()[:-2])
    assert caplog.text.count("Traceback") == 2
    assert tier.counters.snapshot()["errors"] == 2
    assert not tier.resting()
    assert load(tier, 0) == features(0)


@contextmanager
def locked(tier: DiskTier) -> Iterator[None]:
    """The lock as someone on another machine may hold it."""
    with open(tier.directory.root / "lock", "rb+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_a_lock_that_is_never_given_back(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(directory, "LOCK_S", 0.2)
    flip(put(tier, 0))
    put(tier, 1)
    with locked(tier):
        assert load(tier, 1) == features(1)
        assert load(tier, 0) is None
        assert save(tier, 1)  # it is there
        assert not save(tier, 2)
        assert not save(tier, 3)
    assert "(writing) is off" in caplog.text
    assert "was held by another process for 0.2 s" in caplog.text
    counts = tier.counters.snapshot()
    assert (counts["errors"], counts["dropped"], counts["set_aside"]) == (1, 1, 1)


def test_a_lock_that_is_given_back(tier: DiskTier) -> None:
    put(tier, 0)
    with locked(tier):
        thread = threading.Thread(target=save, args=(tier, 1))
        thread.start()
        time.sleep(0.1)
        assert not has(tier, 1)
    thread.join()
    assert load(tier, 1) == features(1)


def test_cleared_while_a_writer_waits_for_the_lock(tier: DiskTier) -> None:
    """The lock that it gets is no lock any more: it makes another one."""
    put(tier, 0)
    with locked(tier):
        thread = threading.Thread(target=save, args=(tier, 1))
        thread.start()
        time.sleep(0.1)
        shutil.rmtree(tier.directory.root.parent)
    thread.join()
    assert load(tier, 1) == features(1)
    assert int((tier.directory.root / "lock").read_text()) == PACKED_BYTES
    assert tier.counters.snapshot()["errors"] == 0


@pytest.mark.slow
def test_clear_leaves_nothing_and_harms_nobody(tier: DiskTier, tmp_path: Path) -> None:
    """Again and again, while others write, read and set aside."""
    wrong: list[int] = []
    tiers = [tier, DiskTier(tmp_path / "store", BUDGET_BYTES)]

    def work(mine: DiskTier, first: int) -> None:
        for number in range(first, first + 100):
            save(mine, number)
            if number % 10 == 0:
                mine.directory.set_aside(identity(number).key)
            if load(mine, number) not in (None, features(number)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(one, 1000 * index)) for index, one in enumerate(tiers)]
    for thread in threads:
        thread.start()
    cleared = 0
    while any(thread.is_alive() for thread in threads):
        if tier.directory.is_there():
            cleared += tier.directory.clear()
    for thread in threads:
        thread.join()
    assert not wrong
    assert cleared
    assert [one.counters.snapshot()["errors"] for one in tiers] == [0, 0]
    put(tier, 0)
    tier.directory.clear()
    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.slow
def test_servers_of_different_models_in_one_directory(tmp_path: Path) -> None:
    """The same images, other identities and shapes, and together more than the budget."""
    shapes = {"one": SHAPE, "other": Shape(9, 100, "float32")}
    wrong: list[str] = []
    hits: list[str] = []

    def serve(model: str) -> None:
        tier = DiskTier(tmp_path, 30 * PACKED_BYTES)
        shape = shapes[model]
        drawn = random.Random(model)
        for _ in range(300):
            number = drawn.randrange(20)
            asked, data = replace(identity(number), model=model), features(number, shape)
            room = memoryview(bytearray(shape.num_bytes))

            def into(room: memoryview = room) -> memoryview:
                return room

            if tier.load(asked, shape, into, time.monotonic() + 60):
                hits.append(model)
                wrong.extend([model] if room != data else [])
            else:
                tier.save(asked, shape, data)
        counts = tier.counters.snapshot()
        wrong.extend(name for name in ("set_aside", "errors") if counts[name])

    threads = [threading.Thread(target=serve, args=(model,)) for model in shapes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert set(hits) == set(shapes)
    assert held_bytes(tmp_path) <= 30 * PACKED_BYTES
