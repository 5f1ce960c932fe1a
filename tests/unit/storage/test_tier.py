# SPDX-License-Identifier: Apache-2.0
"""A tier over a backend in memory that fails, hangs and lies as told: nothing of it reaches who asks."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import pytest

from tests.support.storage_contract import KEYED, THINGS, Clock, ThingCheck, Things, counted, counts, now
from tests.support.tiers import LONG_S, MemoryBackend
from vllm_mmcache.base.errors import StoreCorrupt, StoreForeign, StoreUnusable
from vllm_mmcache.storage import breaker
from vllm_mmcache.storage import tier as tier_module
from vllm_mmcache.storage.backend import Busy, BytesEntry, DeadlineExceeded, EntryInfo, PartUnavailable, Usage
from vllm_mmcache.storage.encryption import PLAIN
from vllm_mmcache.storage.frame import MAX_VALUE_BYTES, frame
from vllm_mmcache.storage.tier import PIECE_BYTES, Tier, pieces

KEY = b"k" * 32
CONTENT = Things()


class Scripted(MemoryBackend):
    """Raises in the named methods what is set, and counts calls."""

    failures = (OSError, StoreUnusable)
    rest_s = 10.0, 40.0
    ttl_s = 100

    def __init__(self) -> None:
        super().__init__("disk")
        self.raises: dict[str, BaseException] = {}
        self.calls: list[str] = []
        self.reads: list[tuple[int, int]] = []
        self.during: Callable[[], object] = lambda: None
        self.is_replaced = False
        self.usage = Usage()
        self.used: list[bytes] = []

    def _call(self, method: str) -> None:
        self.calls.append(method)
        if method in self.raises:
            raise self.raises[method]

    @contextmanager
    def open(self, name: bytes) -> Iterator["Watched | None"]:  # type: ignore[override]
        self._call("open")
        content = self.entries.get(name)
        yield None if content is None else Watched(self, name, content)
        self._call("closed")

    def touch(self, name: bytes) -> bool:
        self._call("touch")
        return super().touch(name)

    def put(self, name: bytes, parts: object, num_bytes: int) -> Usage:
        self._call("put")
        super().put(name, parts, num_bytes)  # type: ignore[arg-type]
        return self.usage

    def put_many(self, entries: Mapping[bytes, bytes]) -> Usage:
        self._call("put_many")
        self.entries |= entries
        return self.usage

    def reject(self, name: bytes) -> None:
        self._call("reject")
        super().reject(name)

    def sweep(self) -> Usage:
        self._call("sweep")
        return self.usage

    def scan(self) -> Iterator[EntryInfo]:
        self._call("scan")
        return super().scan()

    def clear(self) -> int:
        self._call("clear")
        return super().clear()

    def recover(self, error: Exception) -> str:
        return f"recovered from {error}"


class Watched:
    """An open entry that is no bytes in memory."""

    written_s = 5.0

    def __init__(self, backend: Scripted, name: bytes, content: bytes) -> None:
        self.num_bytes = len(content)
        self._backend, self._name, self._bytes = backend, name, BytesEntry(content)

    def read_into(self, offset: int, buffer: memoryview, until: float) -> None:
        self._backend.reads.append((offset, len(buffer)))
        self._backend.during()
        self._backend._call("read_into")
        self._bytes.read_into(offset, buffer)

    def is_current(self) -> bool:
        self._backend._call("is_current")
        return not self._backend.is_replaced

    def mark_used(self) -> None:
        self._backend.used.append(self._name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (breaker, tier_module):
        monkeypatch.setattr(
            module, "time", type("Module", (), {"monotonic": clock.monotonic, "perf_counter": time.perf_counter})
        )
    return clock


@pytest.fixture
def backend() -> Scripted:
    return Scripted()


@pytest.fixture
def tier(backend: Scripted, clock: Clock) -> Tier:
    return Tier(THINGS, backend)


def is_off(tier: Tier) -> tuple[bool, bool]:
    """Reading, writing."""
    return tier.is_open(), tier._writing.is_open()


# Streaming.


@pytest.mark.parametrize("codec", [PLAIN, KEYED], ids=["plain", "encrypted"])
@pytest.mark.parametrize("num_bytes", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES + 5])
def test_content_comes_in_pieces(backend: Scripted, codec: object, num_bytes: int) -> None:
    """Into the memory that was given, and no byte beside it; each piece is checked."""
    tier = Tier(THINGS, backend, codec)  # type: ignore[arg-type]
    content = memoryview(bytes(range(251)) * (num_bytes // 251 + 1))[:num_bytes]
    checker = ThingCheck(KEY, num_bytes)
    checker.add(content)
    head = checker._hasher.digest()
    assert tier.put(KEY, lambda: [head, *pieces(content)], 32 + num_bytes)
    room = memoryview(bytearray(b"\xa5" * (num_bytes + 16)))
    seen: list[int] = []
    watching = ThingCheck(KEY, num_bytes)
    add = watching.add
    watching.add = lambda piece: (seen.append(len(piece)), add(piece))  # type: ignore[assignment, method-assign]
    assert tier.load(KEY, watching, lambda: room[8:-8], time.monotonic() + LONG_S)
    assert room[8:-8] == content
    assert bytes(room[:8]) == bytes(room[-8:]) == b"\xa5" * 8
    assert sum(seen) == num_bytes
    assert max(seen, default=0) <= PIECE_BYTES
    if codec is PLAIN:
        assert all(before <= PIECE_BYTES for _, before in backend.reads)
    assert (counts(tier)["read_bytes"], counts(tier)["hits"]) == (num_bytes, 1)
    assert (
        counts(tier)["saved_bytes"]
        == len(backend.entries[tier.codec.name(KEY)])
        == tier.codec.num_bytes(32 + num_bytes)
    )
    assert backend.used == [tier.codec.name(KEY)]


def test_no_room_is_a_miss_and_the_entry_stays(tier: Tier, backend: Scripted) -> None:
    assert CONTENT.put(tier, 0)
    checker = ThingCheck(CONTENT.key(0), len(CONTENT.content(0)))
    assert not tier.load(CONTENT.key(0), checker, lambda: None, now() + LONG_S)
    assert counted(tier, saved=1, misses=1, dropped=1)
    assert CONTENT.find(tier, 0) == CONTENT.content(0)
    assert backend.used == [CONTENT.key(0)]  # the one that was wanted


def test_no_room_is_asked_for_where_nothing_fits(tier: Tier, backend: Scripted) -> None:
    assert CONTENT.put(tier, 0)
    backend.entries[CONTENT.key(1)] = b"no thing"
    backend.entries[CONTENT.key(2)] = b""
    for number, num_bytes in ((0, 5), (1, 5), (2, 5), (3, 5), (0, backend.max_bytes + 1)):
        checker = ThingCheck(CONTENT.key(number), num_bytes)
        until = now() + LONG_S
        assert not tier.load(CONTENT.key(number), checker, lambda: pytest.fail("asked"), until)


# What goes wrong.


@pytest.mark.parametrize("method", ["open", "read_into", "closed", "is_current"])
@pytest.mark.parametrize("error", [OSError("on purpose"), StoreUnusable("on purpose")])
def test_reading_that_fails(
    tier: Tier, backend: Scripted, clock: Clock, method: str, error: Exception, log: pytest.LogCaptureFixture
) -> None:
    """Wherever it is: a miss and one error, and reading is left alone; writing goes on."""
    assert CONTENT.put(tier, 0)
    if method == "is_current":
        backend.entries[CONTENT.key(0)] = CONTENT.entry(0, 0)[:-1] + b"x"
    backend.raises[method] = error
    for _ in range(5):
        assert CONTENT.find(tier, 0) is None
    assert counted(tier, saved=1, misses=5, errors=1)
    assert is_off(tier) == (True, False)
    assert f"{tier.where} (reading) is off, and is tried again after 10 s" in log.text
    assert "recovered from on purpose" in log.text
    assert CONTENT.put(tier, 1)
    backend.raises.clear()
    clock.ahead_s += 11
    assert CONTENT.find(tier, 1) == CONTENT.content(1)


@pytest.mark.parametrize("method", ["touch", "put"])
def test_writing_that_fails(tier: Tier, backend: Scripted, clock: Clock, method: str) -> None:
    assert CONTENT.put(tier, 0)
    backend.raises[method] = OSError("on purpose")
    for number in range(1, 6):
        assert not CONTENT.put(tier, number)
    assert counted(tier, saved=1, dropped=5, errors=1)
    assert is_off(tier) == (False, True)
    assert CONTENT.find(tier, 0) == CONTENT.content(0)
    backend.raises.clear()
    clock.ahead_s += 11
    assert CONTENT.put(tier, 1)


@pytest.mark.parametrize(
    "method", ["open", "read_into", "closed", "reject", "is_current", "touch", "put", "put_many", "sweep", "clear"]
)
def test_a_bug_in_a_backend_reaches_nobody(
    tier: Tier, backend: Scripted, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged with its place, and is no reason to leave the backend alone."""
    assert CONTENT.put(tier, 0)
    if method in ("reject", "is_current"):
        backend.entries[CONTENT.key(0)] = b"no thing at all"
    backend.raises[method] = ZeroDivisionError("a bug")
    found = CONTENT.find(tier, 0)
    hit = tier.get(KEY, bytes)
    is_put = CONTENT.put(tier, 1)
    tier.put_many({KEY: b"value"})
    tier.tidy()
    if method == "clear":
        with pytest.raises(ZeroDivisionError):  # the command line shows it
            tier.clear()
        return
    assert (found, hit) == (None if method not in ("touch", "put", "put_many", "sweep") else CONTENT.content(0), None)
    assert is_put == (method not in ("touch", "put"))
    assert counts(tier)["errors"] == caplog.text.count("a bug in the tier of") >= 1
    assert "ZeroDivisionError: a bug" in caplog.text
    assert is_off(tier) == (False, False)


def test_a_bug_of_the_caller_reaches_nobody(tier: Tier, caplog: pytest.LogCaptureFixture) -> None:
    assert CONTENT.put(tier, 0)
    checker = ThingCheck(CONTENT.key(0), len(CONTENT.content(0)))
    until = now() + LONG_S
    assert not tier.load(CONTENT.key(0), checker, lambda: memoryview(bytes(1 // 0)), until)
    assert not tier.put(KEY, lambda: [bytes(1 // 0)], 5)
    assert caplog.text.count("Traceback") == counts(tier)["errors"] == 2
    assert is_off(tier) == (False, False)
    assert CONTENT.find(tier, 0) == CONTENT.content(0)


def test_what_read_raises_is_the_callers_own(tier: Tier) -> None:
    tier.put_many({KEY: b"value"})
    with pytest.raises(ZeroDivisionError):
        tier.get(KEY, lambda value: 1 // 0)


def test_others_that_use_it_are_no_failure_of_reading(tier: Tier, backend: Scripted) -> None:
    assert CONTENT.put(tier, 0)
    backend.raises["open"] = Busy("by others")
    assert CONTENT.find(tier, 0) is None
    assert tier.get(KEY, bytes) is None
    backend.raises = {"sweep": Busy("by others")}
    tier.tidy()
    assert counted(tier, saved=1, misses=2)
    assert is_off(tier) == (False, False)
    backend.raises = {"put": Busy("by others")}
    assert not CONTENT.put(tier, 1)
    assert is_off(tier) == (False, True)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_part_that_does_not_serve_is_no_failure_of_the_rest(tier: Tier, backend: Scripted, is_new: bool) -> None:
    """It counts as an error when it was asked."""
    backend.raises = dict.fromkeys(("open", "touch", "put_many"), PartUnavailable("a node", is_new=is_new))
    assert CONTENT.find(tier, 0) is None
    assert tier.get(KEY, bytes) is None
    assert not CONTENT.put(tier, 0)
    tier.put_many({KEY: b"value"})
    assert counted(tier, misses=2, dropped=2, errors=4 * is_new)
    assert is_off(tier) == (False, False)


def test_a_part_of_many_that_fails(tier: Tier, backend: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other groups are kept; after a failure of all, nothing is tried any more."""
    monkeypatch.setattr(backend, "groups", lambda names: [[name] for name in names])
    error: Exception = PartUnavailable("a node", is_new=True)

    def put_many(entries: Mapping[bytes, bytes]) -> Usage:
        backend.calls.append("put_many")
        if b"1" * 32 in entries:
            raise error
        return Usage(7, 2)

    monkeypatch.setattr(backend, "put_many", put_many)
    values = {b"%d" % number * 32: b"value" for number in range(4)}
    tier.put_many(values)
    assert counted(tier, saved=3, dropped=1, errors=1)
    assert (counts(tier)["evictions"], tier.counts.held_bytes) == (6, 7)
    error = OSError("all of it")
    backend.calls.clear()
    tier.put_many(values)
    assert counted(tier, saved=4, dropped=4, errors=2)
    assert backend.calls == ["put_many"] * 2


def test_a_value_that_takes_too_long_is_a_failure(tier: Tier, backend: Scripted) -> None:
    """So that the next request does not wait for it, too: a value is waited for by requests, and is small."""
    tier.put_many({KEY: b"value"})
    backend.raises["read_into"] = DeadlineExceeded()
    assert tier.get(KEY, bytes) is None
    assert counted(tier, saved=1, misses=1, errors=1)
    assert is_off(tier) == (True, False)


# What is none of ours.


@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_was_replaced_while_it_was_read_is_not_rejected(tier: Tier, backend: Scripted, is_replaced: bool) -> None:
    assert CONTENT.put(tier, 0)
    backend.entries[CONTENT.key(0)] = CONTENT.entry(0, 0)[:-1] + b"x"
    backend.is_replaced = is_replaced
    assert CONTENT.find(tier, 0) is None
    assert counted(tier, saved=1, misses=1, rejected=not is_replaced)
    assert (CONTENT.key(0) in backend.entries) is is_replaced


def test_what_is_damaged_and_cannot_be_removed_keeps_nobody_from_the_rest(tier: Tier, backend: Scripted) -> None:
    """On a disk that may only be read."""
    for number in range(2):
        assert CONTENT.put(tier, number)
    backend.entries[CONTENT.key(0)] = CONTENT.entry(0, 0)[:-1] + b"x"
    backend.raises["reject"] = OSError("read-only")
    assert CONTENT.find(tier, 0) is None
    assert counted(tier, saved=2, misses=1, rejected=1, errors=1)
    assert CONTENT.find(tier, 1) == CONTENT.content(1)


def test_the_first_that_is_damaged_is_a_warning(
    tier: Tier, backend: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "vllm.mmcache")
    for number in range(3):
        backend.entries[CONTENT.key(number)] = b"no thing"
        assert CONTENT.find(tier, number) is None
    said = [record.levelname for record in caplog.records if "set aside" in record.message]
    assert said == ["WARNING", "DEBUG", "DEBUG"]
    assert CONTENT.key(0).hex() in caplog.text


def test_a_value_that_the_caller_refuses(tier: Tier, backend: Scripted) -> None:
    tier.put_many({KEY: b"value"})
    hit = tier.get(KEY, bytes)
    assert hit is not None
    assert (hit[0].content, hit[0].written_s, hit[1]) == (b"value", 5.0, b"value")
    assert tier.get(KEY, lambda content: None) is None
    assert counted(tier, saved=1, hits=1, misses=1, rejected=1)
    assert KEY in backend.entries  # who puts it next writes over it


def test_no_more_than_a_value_can_have_is_read(tier: Tier, backend: Scripted) -> None:
    backend.entries[KEY] = frame(KEY, bytes(MAX_VALUE_BYTES))
    assert tier.get(KEY, bytes) is not None
    for longer in (frame(KEY, bytes(MAX_VALUE_BYTES)) + b"x", frame(KEY, bytes(MAX_VALUE_BYTES + 1)), bytes(2**20)):
        backend.entries[KEY] = longer
        assert tier.get(KEY, bytes) is None
    assert len(backend.reads) == 1
    assert counted(tier, hits=1, misses=3, rejected=3)


# The rest.


def test_tidy_is_for_what_has_a_time(tier: Tier, backend: Scripted) -> None:
    backend.usage = Usage(50, 3)
    tier.tidy()
    assert (tier.counts.held_bytes, counts(tier)["evictions"], backend.calls) == (50, 3, ["sweep"])
    backend.ttl_s = 0
    tier.tidy()
    assert backend.calls == ["sweep"]
    backend.ttl_s = 100
    backend.raises["sweep"] = OSError("on purpose")
    tier.tidy()
    tier.tidy()
    assert (counts(tier)["errors"], is_off(tier), backend.calls.count("sweep")) == (1, (False, True), 2)
    with pytest.raises(OSError, match="on purpose"):  # the command line shows it
        tier.sweep()


@pytest.mark.parametrize("is_shared", [False, True])
def test_clear_leaves_what_machines_share(tier: Tier, backend: Scripted, is_shared: bool) -> None:
    assert CONTENT.put(tier, 0)
    backend.is_shared = is_shared
    tier.clear()
    assert bool(backend.entries) is is_shared
    backend.raises["clear"] = OSError("on purpose")
    tier.clear()


def test_check_says_what_it_took_out(tier: Tier, backend: Scripted) -> None:
    bad: dict[bytes, Exception] = {b"c" * 32: StoreCorrupt("why"), b"f" * 32: StoreForeign("of another version")}
    backend.entries = dict.fromkeys([b"g" * 32, *bad], b"content")

    def check(name: bytes, content: bytearray) -> None:
        assert content == b"content"
        if name in bad:
            raise bad[name]

    assert tier.check(check) == (1, [((b"c" * 32).hex(), "why")])
    assert backend.entries.keys() == {b"g" * 32, b"f" * 32}
    backend.raises["scan"] = OSError("on purpose")
    with pytest.raises(OSError, match="on purpose"):
        tier.check(check)


def test_sizes_of_a_tier(tier: Tier, backend: Scripted) -> None:
    assert tier.size() == (None, None, None)  # a server's business
    backend.budget_bytes, backend.usage = 100, Usage(60, 0)
    assert CONTENT.put(tier, 0)
    assert tier.size() == (None, 60, 100)
    assert (tier.ttl_s, tier.max_bytes, tier.where) == (100, backend.max_bytes, "things in disk")
