# SPDX-License-Identifier: Apache-2.0
"""Files of tenants in a directory and in fsspec's memory, with and without encryption."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from vllm_mmcache.base.errors import FilesUnusable
from vllm_mmcache.base.settings import Settings
from vllm_mmcache.files import store as file_store
from vllm_mmcache.files.access import REST_S
from vllm_mmcache.files.store import ENTRY_BYTES, FileInfo, FileLost, FileStore, QuotaExceeded
from vllm_mmcache.storage.encryption import PLAIN, AesGcmCodec, PlainCodec

CONTENT = b"the content of an image's file" * 40
ALICE, BOB = b"a" * 32, b"b" * 32
HOUR = 3600


def kept(store: FileStore, tenant: bytes | None = ALICE, content: bytes = CONTENT, **more: Any) -> FileInfo:
    given = {"filename": "a.png", "purpose": "vision", "media_type": "image/png", **more}
    return store.put(tenant, content, **given)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Tests move time on, and the clock of the place does not go with it. Gives what compares the two again."""
    compare = FileStore._is_clock_right
    monkeypatch.setattr(FileStore, "_is_clock_right", lambda store: True)
    return lambda: monkeypatch.setattr(FileStore, "_is_clock_right", compare)


@pytest.fixture(params=["directory", "memory", "encrypted"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, str, PlainCodec]]:
    codec = AesGcmCodec(b"k" * 32) if request.param == "encrypted" else PLAIN
    if request.param == "memory":
        memory = fsspec.filesystem("memory", skip_instance_cache=True)
        yield memory, "/files", codec
        memory.rm("/files", recursive=True)
    else:
        yield fsspec.filesystem("file"), str(tmp_path / "files"), codec


def opened(place: tuple[Any, str, PlainCodec], ttl_s: int = 0, quota: int = 10**6) -> FileStore:
    filesystem, root, codec = place
    return FileStore(filesystem, root, codec=codec, ttl_s=ttl_s, quota=quota)


@pytest.fixture
def store(place: tuple[Any, str, PlainCodec]) -> FileStore:
    return opened(place)


def objects(place: tuple[Any, str, PlainCodec]) -> list[str]:
    filesystem, root, _ = place
    return sorted(filesystem.find(root)) if filesystem.exists(root) else []


def test_kept_found_and_removed(store: FileStore, place: tuple[Any, str, PlainCodec]) -> None:
    info = kept(store)
    other = opened(place)  # another replica
    assert other.find(ALICE, info.id) == info
    assert other.read(ALICE, info) == CONTENT
    assert other.files_of(ALICE) == [info]
    assert store.delete(ALICE, info.id)
    assert other.find(ALICE, info.id) is None
    assert not other.delete(ALICE, info.id)
    assert objects(place) == [], "nothing of it is left"
    with pytest.raises(FileLost, match="is gone"):
        other.read(ALICE, info)


def test_what_is_being_written_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory, objects come into their places whole, from beside them: not out of another file system."""
    filesystem = LocalFileSystem(skip_instance_cache=True)
    store = opened((filesystem, str(tmp_path), PLAIN))
    info = kept(store)
    moved: list[tuple[str, str]] = []

    def move(source: str, target: str, **_: Any) -> None:
        assert Path(source).parent == Path(target).parent
        assert store.read(ALICE, info) == CONTENT
        assert store.files_of(ALICE) == [info]
        moved.append((source, target))
        if len(moved) == 2:
            raise OSError("no room")
        Path(source).rename(target)

    monkeypatch.setattr(filesystem, "mv", move)
    with pytest.raises(FilesUnusable):
        kept(store, content=CONTENT[::-1])
    assert len(moved) == 2
    assert len(objects((filesystem, str(tmp_path), PLAIN))) == 3, "nothing is left of what could not be moved"
    assert not filesystem.transaction.files, "fsspec holds on to nothing"


def test_the_same_bytes_have_the_same_name(store: FileStore) -> None:
    first, second = kept(store), kept(store, filename="b.png")
    assert first.id == second.id
    assert [info.filename for info in store.files_of(ALICE)] == ["b.png"]
    assert kept(store, content=CONTENT + b".").id != first.id


def test_tenants_share_nothing(store: FileStore) -> None:
    infos = {tenant: kept(store, tenant) for tenant in (ALICE, BOB, None)}
    assert len({info.id for info in infos.values()}) == 3
    for tenant, info in infos.items():
        assert store.files_of(tenant) == [info]
        for other in set(infos) - {tenant}:
            assert store.find(other, info.id) is None
            assert not store.delete(other, info.id)
            with pytest.raises(FileLost):
                store.read(other, info)
    assert store.read(None, infos[None]) == CONTENT


def test_names_do_not_tell_that_two_tenants_use_the_same(place: tuple[Any, str, PlainCodec]) -> None:
    store = opened(place)
    for tenant in (ALICE, BOB):
        kept(store, tenant, name="the same uuid")
    assert len({path.rpartition("/")[2] for path in objects(place)}) == 4


def test_a_name_that_is_given_to_other_content_while_it_is_read(store: FileStore) -> None:
    first = kept(store, name="a uuid")
    assert store.find_named(ALICE, "a uuid") == first
    second = kept(store, content=CONTENT[::-1], name="a uuid")
    assert store.find_named(ALICE, "a uuid") == second
    assert store.read(ALICE, first, "a uuid") == CONTENT
    assert store.read(ALICE, second, "a uuid") == CONTENT[::-1]


def test_a_name_that_two_give_to_content_at_once(
    place: tuple[Any, str, PlainCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One writes both its objects between the other's two."""
    slow, fast = opened(place), opened(place)
    write = slow._write

    def write_slowly(path: str, content: bytes) -> None:
        write(path, content)
        if not path.endswith(".json"):
            kept(fast, content=CONTENT[::-1], name="a uuid")

    monkeypatch.setattr(slow, "_write", write_slowly)
    kept(slow, name="a uuid")
    info = fast.find_named(ALICE, "a uuid")
    assert info is not None
    assert fast.read(ALICE, info, "a uuid") == CONTENT


def test_sweep_removes_replaced_content_that_no_request_reads_any_more(
    place: tuple[Any, str, PlainCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which counts until then."""
    store, now = opened(place, quota=2 * (len(CONTENT) + ENTRY_BYTES) + 100), time.time()
    first = kept(store, name="a uuid")
    second = kept(store, content=CONTENT[::-1], name="a uuid")
    with pytest.raises(QuotaExceeded):
        kept(store, content=CONTENT[:-1], name="a uuid")
    assert store.sweep() == 0
    assert store.read(ALICE, first, "a uuid") == CONTENT
    monkeypatch.setattr("time.time", lambda: now + file_store._REPLACED_S + 1)
    assert store.sweep() == 1
    assert len(objects(place)) == 2
    assert store.read(ALICE, second, "a uuid") == CONTENT[::-1]
    kept(store, content=CONTENT[:-1], name="a uuid")


def test_an_expired_name_is_removed_with_its_content(
    place: tuple[Any, str, PlainCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = opened(place, ttl_s=HOUR), time.time()
    kept(store, name="a uuid")
    monkeypatch.setattr("time.time", lambda: now + HOUR + 1)
    assert store.sweep() == 1
    assert objects(place) == []


@pytest.mark.parametrize(
    "file_id", ["", "file-", "file-../../etc/passwd", "file-" + "g" * 64, "a" * 69, "file-" + "A" * 64]
)
def test_what_is_no_id_is_unknown(store: FileStore, file_id: str) -> None:
    kept(store)
    assert store.find(ALICE, file_id) is None
    assert not store.delete(ALICE, file_id)


def test_expiry(place: tuple[Any, str, PlainCodec], monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = opened(place, ttl_s=2 * HOUR), int(time.time())
    ends = {hours: kept(store, content=b"%d" % hours, expires_after_s=hours * HOUR) for hours in (1, 3)}
    ends[0] = kept(store)
    lives = {hours: (info.expires_s or 0) - info.created_s for hours, info in ends.items()}
    assert lives == {1: HOUR, 3: 2 * HOUR, 0: 2 * HOUR}
    monkeypatch.setattr("time.time", lambda: now + 1.5 * HOUR)
    assert store.find(ALICE, ends[1].id) is None
    assert {info.id for info in store.files_of(ALICE)} == {ends[3].id, ends[0].id}
    renewed = kept(store)
    monkeypatch.setattr("time.time", lambda: now + 3 * HOUR)
    assert store.files_of(ALICE) == [renewed]
    assert len(objects(place)) == 6
    assert store.sweep() == 2
    assert len(objects(place)) == 2
    assert opened(place).find(ALICE, renewed.id) == renewed


def test_an_upload_sweeps_once_an_hour(place: tuple[Any, str, PlainCodec], monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(place, ttl_s=HOUR)
    swept = threading.Event()
    monkeypatch.setattr(store, "sweep", swept.set)
    lasting = store.writing, store.reading
    kept(store)
    now = time.monotonic()
    assert not swept.is_set()
    monkeypatch.setattr("time.monotonic", lambda: now + HOUR)
    kept(store)
    assert swept.wait(10)
    swept.clear()
    kept(store)
    assert not swept.wait(0.1)
    assert (store.writing, store.reading) == lasting, "an open breaker stays open, and threads are not made again"


def test_sweep_removes_content_of_which_nothing_is_said(place: tuple[Any, str, PlainCodec], monkeypatch: Any) -> None:
    """A server that was ended between the two has left it; another one may be about to say something of it."""
    store = opened(place)
    info = kept(store)
    filesystem, _, _ = place
    (said,) = (path for path in objects(place) if path.endswith(".json"))
    filesystem.rm_file(said)
    assert store.find(ALICE, info.id) is None
    assert store.sweep() == 0
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 2 * 86400)
    assert store.sweep() == 1, "of fsspec's memory, which has no times, since this store has seen it before"
    assert objects(place) == []


def test_content_of_which_something_was_said_between_is_not_abandoned(
    place: tuple[Any, str, PlainCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep has seen it alone before."""
    store, info = opened(place), kept(opened(place))
    filesystem, _, _ = place
    (said,) = (path for path in objects(place) if path.endswith(".json"))
    filesystem.rm_file(said)
    assert store.sweep() == 0
    kept(store)
    assert store.sweep() == 0
    filesystem.rm_file(said)
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 2 * 86400)
    kept(store, content=b"another")
    if not isinstance(filesystem, LocalFileSystem):
        assert store.sweep() == 0
        monkeypatch.setattr("time.time", lambda: now + 4 * 86400)
    assert store.sweep() == 1
    assert store.find(ALICE, info.id) is None


def test_sweep_leaves_what_is_uploaded_while_it_looks(place: tuple[Any, str, PlainCodec], monkeypatch: Any) -> None:
    """Another server says something of old content after the sweep has listed it."""
    store = opened(place)
    info = kept(store)
    (said,) = (path for path in objects(place) if path.endswith(".json"))
    place[0].rm_file(said)
    assert store.sweep() == 0
    now, list_objects = time.time(), store._objects
    monkeypatch.setattr("time.time", lambda: now + 2 * 86400)

    def list_then_upload(folder: str) -> Any:
        listed = [*list_objects(folder)]
        kept(opened(place))
        return listed

    monkeypatch.setattr(store, "_objects", list_then_upload)
    assert store.sweep() == 0
    assert store.read(ALICE, info) == CONTENT
    assert store.find(ALICE, info.id) is not None


def test_quota(place: tuple[Any, str, PlainCodec]) -> None:
    store = opened(place, quota=2 * (len(CONTENT) + ENTRY_BYTES) + 100)
    first = kept(store)
    kept(store, content=CONTENT[::-1])
    kept(store)  # again, which takes no more
    with pytest.raises(QuotaExceeded):
        kept(store, content=CONTENT[:-1])
    kept(store, BOB)
    assert store.delete(ALICE, first.id)
    kept(store, content=CONTENT[:-1])
    assert len(store.files_of(ALICE)) == 2


@pytest.mark.parametrize("num_fitting", [1, 2])
def test_two_uploads_at_once_keep_the_quota(
    place: tuple[Any, str, PlainCodec], num_fitting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One begins while the other is being written; a file that is written under another name first counts once."""
    store = opened(place, quota=num_fitting * (len(CONTENT) + ENTRY_BYTES))
    write, is_writing, may_end = place[0].pipe_file, threading.Event(), threading.Event()

    def write_slowly(*args: Any, **more: Any) -> None:
        write(*args, **more)
        is_writing.set()
        assert may_end.wait(10)

    monkeypatch.setattr(place[0], "pipe_file", write_slowly)
    thread = threading.Thread(target=kept, args=(store,))
    thread.start()
    assert is_writing.wait(10)
    monkeypatch.setattr(place[0], "pipe_file", write)
    try:
        with pytest.raises(QuotaExceeded) if num_fitting == 1 else contextlib.nullcontext():
            kept(store, content=CONTENT[::-1])
    finally:
        may_end.set()
    thread.join(10)
    assert len(store.files_of(ALICE)) == num_fitting


def test_an_upload_that_was_listed_before_the_other_was_written(
    place: tuple[Any, str, PlainCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look at what is there before either has written; the one that came first is kept."""
    store = opened(place, quota=len(CONTENT) + ENTRY_BYTES)
    write = store._write

    def write_late(path: str, content: bytes) -> None:
        monkeypatch.setattr(store, "_write", write)
        with pytest.raises(QuotaExceeded):
            kept(store, content=CONTENT[::-1])
        kept(store, BOB)
        write(path, content)

    monkeypatch.setattr(store, "_write", write_late)
    info = kept(store)
    assert store.files_of(ALICE) == [info]
    assert store.delete(ALICE, info.id)
    kept(store, content=CONTENT[::-1])


def test_expired_files_do_not_use_up_the_quota(
    place: tuple[Any, str, PlainCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are removed when room is needed, of that tenant alone, and not looked for again at each refusal."""
    store, now, clock = opened(place, quota=2 * (len(CONTENT) + ENTRY_BYTES) + 100), time.time(), time.monotonic()
    kept(store, BOB, expires_after_s=HOUR)
    for content in (CONTENT, CONTENT[::-1]):
        kept(store, content=content, expires_after_s=HOUR)
    with pytest.raises(QuotaExceeded):
        kept(store, content=b"one more")
    monkeypatch.setattr("time.time", lambda: now + 2 * HOUR)
    with pytest.raises(QuotaExceeded):
        kept(store, content=b"one more")
    monkeypatch.setattr("time.monotonic", lambda: clock + 2 * file_store.FULL_SWEEP_S)
    assert kept(store, content=b"one more").id in {info.id for info in store.files_of(ALICE)}
    assert len(objects(place)) == 4, "this one's two objects, and those of another tenant"


@pytest.mark.parametrize("fails", ["pipe_file", "cat_ranges"])
def test_what_is_full_can_be_read_all_the_same(
    place: tuple[Any, str, PlainCodec], fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what can't be read can be written to."""
    store = opened(place)
    info = kept(store)

    def fail(*_: object, **__: object) -> None:
        raise OSError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(place[0], fails, fail)
        with pytest.raises(FilesUnusable):
            kept(store, content=b"another") if fails == "pipe_file" else store.read(ALICE, info)
    if fails == "pipe_file":
        assert store.read(ALICE, info) == CONTENT
        assert store.files_of(ALICE) == [info]
        with pytest.raises(FilesUnusable):
            kept(store, content=b"another")
    else:
        kept(store, content=b"another")
        with pytest.raises(FilesUnusable):
            store.read(ALICE, info)


@pytest.mark.parametrize("damage", ["changed", "cut", "another's"])
def test_damaged_content_is_not_served(place: tuple[Any, str, PlainCodec], damage: str) -> None:
    store, (filesystem, _, _) = opened(place), place
    info, other = kept(store), kept(store, content=CONTENT[::-1])
    one, two = (path for path in objects(place) if not path.endswith(".json"))
    stored = filesystem.cat_file(one)
    flipped = bytes([stored[-1] ^ 1])
    filesystem.pipe_file(
        one, {"changed": stored[:-1] + flipped, "cut": stored[:-1]}.get(damage, filesystem.cat_file(two))
    )
    served = []
    for file, content in ((info, CONTENT), (other, CONTENT[::-1])):
        with contextlib.suppress(FileLost):
            served.append(store.read(ALICE, file) == content)
    assert served == [True], "the other one is refused"


def test_encrypted_files_show_nothing(tmp_path: Path) -> None:
    store = opened((fsspec.filesystem("file"), str(tmp_path), AesGcmCodec(b"k" * 32)))
    info = kept(store, filename="passport.png")
    for path in tmp_path.rglob("*"):
        shown = str(path.relative_to(tmp_path)).encode() + (path.read_bytes() if path.is_file() else b"")
        for secret in (CONTENT[:16], b"passport", info.id.removeprefix("file-").encode(), ALICE.hex().encode()):
            assert secret not in shown
    other_key = opened((fsspec.filesystem("file"), str(tmp_path), AesGcmCodec(b"l" * 32)))
    assert other_key.files_of(ALICE) == []


def test_a_place_that_does_not_serve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left alone for a while, so that what waits for it waits once, and then tried again."""
    (tmp_path / "file").write_text("no directory")
    store = opened((fsspec.filesystem("file"), str(tmp_path / "file"), PLAIN))
    for _ in range(2):
        with pytest.raises(FilesUnusable, match="ask again later"):
            kept(store)
    said = "with the files of clients, writing is off"
    assert len([record for record in caplog.records if said in record.getMessage()]) == 1
    (tmp_path / "file").unlink()
    with pytest.raises(FilesUnusable):
        kept(store)
    now = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now + REST_S[0])
    assert store.files_of(ALICE) == []
    assert store.find(ALICE, kept(store).id) is not None


def test_nobody_is_left_to_wait_for_a_place_that_hangs(
    place: tuple[Any, str, PlainCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading fails, as if the place had said so; writing does not need what hangs, and goes on."""
    monkeypatch.setattr(file_store, "CALL_S", 1.0)
    store, hangs = opened(place), threading.Event()
    info = kept(store)
    read = place[0].cat_ranges
    monkeypatch.setattr(place[0], "cat_ranges", lambda *args, **more: hangs.wait(20) and read(*args, **more))
    start = time.monotonic()
    for _ in range(2):
        with pytest.raises(FilesUnusable, match="ask again later"):
            store.reading.wait_for(lambda: store.read(ALICE, info))
    assert time.monotonic() - start < 5
    store.writing.wait_for(lambda: kept(store, content=b"another"))
    hangs.set()
    now = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: now + REST_S[0])
    assert store.reading.wait_for(lambda: store.read(ALICE, info)) == CONTENT


def test_what_can_not_be_said_of_a_file_is_not_the_places_fault(store: FileStore) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        kept(store, filename="a\ud800")
    assert store.find(ALICE, kept(store).id) is not None


def test_uploads_in_a_row_list_what_is_there_once(
    place: tuple[Any, str, PlainCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quota is kept all the same: before an upload is refused, all is listed."""
    most = 6
    store, listed, clock = opened(place, quota=most * (ENTRY_BYTES + 100)), list[str](), time.monotonic()
    list_objects = store._objects
    monkeypatch.setattr(store, "_objects", lambda folder: (listed.append(folder), list_objects(folder))[1])
    infos = [kept(store, content=b"%d" % number) for number in range(most)]
    assert len(listed) == 1
    with pytest.raises(QuotaExceeded):
        kept(store, content=b"one more")
    num_listed = len(listed)
    store.delete(ALICE, infos[0].id)
    kept(store, content=b"one more")
    assert len(listed) == num_listed + 1, "it was not listed since one is gone"
    kept(opened(place), BOB)
    kept(store, BOB, content=b"0")
    kept(store, BOB, content=b"1")
    assert len(listed) == num_listed + 2, "and another tenant's by themselves"
    monkeypatch.setattr("time.monotonic", lambda: clock + 2 * file_store.HELD_S)
    kept(store, BOB, content=b"2")
    assert len(listed) == num_listed + 3


def test_one_server_sweeps_for_all(place: tuple[Any, str, PlainCodec], monkeypatch: pytest.MonkeyPatch) -> None:
    stores, now, swept = [opened(place), opened(place)], time.time(), list[int]()
    kept(stores[0])
    for number, store in enumerate(stores):
        monkeypatch.setattr(store, "sweep", lambda number=number: swept.append(number))
    for store in (*stores, *stores):
        store._sweep_behind()
    assert swept == [0]
    monkeypatch.setattr("time.time", lambda: now + file_store.SWEEP_S + 1)
    for store in reversed(stores):
        store._sweep_behind()
    assert swept == [0, 1]
    note = f"{stores[0]._root}/notes/swept"
    place[0].pipe_file(note, b"what is no time")
    stores[0]._sweep_behind()
    assert swept == [0, 1, 0]


def test_a_sweep_that_failed_is_made_again_soon(
    place: tuple[Any, str, PlainCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this server or by another one, whatever was noted when it began."""
    store, other, swept = opened(place), opened(place), list[str]()
    kept(store)

    def fail() -> int:
        raise FilesUnusable("says a test")

    monkeypatch.setattr(store, "sweep", fail)
    monkeypatch.setattr(other, "sweep", lambda: swept.append("other"))
    store._sweep_behind()
    other._sweep_behind()
    assert swept == ["other"]
    assert time.monotonic() - store._swept > file_store.SWEEP_S - 2 * file_store.FULL_SWEEP_S


def test_a_server_whose_clock_is_wrong_leaves_the_sweep_to_others(
    place: tuple[Any, str, PlainCodec], clock: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, right, now = opened(place), opened(place), time.time()
    kept(right)
    clock()
    swept: list[str] = []
    monkeypatch.setattr(wrong, "sweep", lambda: swept.append("wrong"))
    monkeypatch.setattr(right, "sweep", lambda: swept.append("right"))
    with monkeypatch.context() as fast:
        fast.setattr("time.time", lambda: now + 120)
        wrong._sweep_behind()
    assert swept == []
    right._sweep_behind()
    assert swept == ["right"]


def test_a_place_that_is_full_is_swept_all_the_same(
    place: tuple[Any, str, PlainCodec], clock: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an upload that it does not take, so that it takes the next one."""
    store, now, later = opened(place, ttl_s=HOUR), time.time(), time.monotonic()
    kept(store)
    clock()
    is_swept = threading.Event()
    sweep = store.sweep
    monkeypatch.setattr(store, "sweep", lambda: (sweep(), is_swept.set()))

    def fail(*_: object, **__: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(place[0], "pipe_file", fail)
    monkeypatch.setattr("time.time", lambda: now + HOUR + 1)
    monkeypatch.setattr("time.monotonic", lambda: later + file_store.SWEEP_S)
    with pytest.raises(FilesUnusable):
        kept(store, content=b"another")
    assert is_swept.wait(10)
    assert objects(place) == []


def test_a_place_that_is_full_can_be_swept(
    place: tuple[Any, str, PlainCodec], clock: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes nothing that would tell the time."""
    store, now = opened(place, ttl_s=HOUR), time.time()
    kept(store)
    clock()

    def fail(*_: object, **__: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(place[0], "pipe_file", fail)
    monkeypatch.setattr("time.time", lambda: now + HOUR + 1)
    assert store.sweep() == 1


def test_an_upload_that_is_kept_while_another_one_lists(
    place: tuple[Any, str, PlainCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts, although the list does not have it."""
    store = opened(place, quota=2 * (ENTRY_BYTES + 100))
    list_objects = store._objects

    def list_first(folder: str) -> Any:
        listed = [*list_objects(folder)]
        monkeypatch.setattr(store, "_objects", list_objects)
        kept(store, content=b"in the meantime")
        return listed

    monkeypatch.setattr(store, "_objects", list_first)
    kept(store, content=b"one")
    with pytest.raises(QuotaExceeded):
        kept(store, content=b"one more")


def test_a_server_whose_clock_is_wrong_removes_nothing(
    place: tuple[Any, str, PlainCodec],
    clock: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, now = opened(place, ttl_s=HOUR), time.time()
    kept(store)
    clock()
    with monkeypatch.context() as wrong:
        wrong.setattr("time.time", lambda: now + 2 * HOUR)
        assert store.sweep() == 0
    assert "clock differs by 7" in caplog.text
    assert len(objects(place)) == 2, "the file's, and none of what was written to see the time"
    monkeypatch.setattr(file_store, "MOST_OFF_S", 3 * HOUR)
    monkeypatch.setattr("time.time", lambda: now + 2 * HOUR)
    assert store.sweep() == 1, "the control"


def test_a_directory_is_the_servers_alone(tmp_path: Path) -> None:
    """Also where it lies in one that is open to all."""
    mount = tmp_path / "mount"
    mount.mkdir()
    mount.chmod(0o755)
    for below in ("", "named"):
        kept(FileStore.of(Settings(files=str(mount)), below))
    made = [path for path in mount.rglob("*") if path.is_dir()]
    assert len(made) == 5
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}
    assert mount.stat().st_mode & 0o777 == 0o755


def test_a_directory_is_made_for_the_server_alone(tmp_path: Path) -> None:
    store = FileStore.of(Settings(files=str(tmp_path / "new" / "files")))
    kept(store)
    assert (tmp_path / "new" / "files").stat().st_mode & 0o777 == 0o700
    assert FileStore.of(Settings(files=f"file://{tmp_path}/new/files")).files_of(ALICE) == store.files_of(ALICE)


def test_a_place_that_fsspec_does_not_know() -> None:
    with pytest.raises(FilesUnusable, match="nowhere"):
        FileStore.of(Settings(files="nowhere://a/b"))
