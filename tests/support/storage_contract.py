# SPDX-License-Identifier: Apache-2.0
"""What every backend of the storage keeps to, with every kind of content.

The tests of a backend have a Place, which opens backends and does harm behind their backs, and

    class TestFiles(StorageContract):
        @pytest.fixture
        def place(self, tmp_path): return FilesPlace(tmp_path)

What a backend can't be, such as full, its Place says in `never`, with the reason. Each fault has its control: the same
is done without the fault before it, and after it.
"""

import secrets
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from blake3 import blake3

from tests.support.packages import SHAPE, features, identity
from tests.support.packages import save as save_package
from tests.support.refusals import limited_files
from tests.support.tiers import LONG_S
from vllm_mmcache.base.errors import StoreCorrupt
from vllm_mmcache.components.features import tiers
from vllm_mmcache.components.features.package import FORMAT, pack
from vllm_mmcache.metrics.counters import LabelledCounter
from vllm_mmcache.storage import breaker
from vllm_mmcache.storage import tier as tier_module
from vllm_mmcache.storage.backend import Backend, Buffer, BytesEntry
from vllm_mmcache.storage.encryption import PLAIN, AesGcmCodec, PlainCodec
from vllm_mmcache.storage.frame import MAX_VALUE_BYTES, check, frame
from vllm_mmcache.storage.kind import Kind
from vllm_mmcache.storage.record_store import RECORDS
from vllm_mmcache.storage.tier import Tier

BUDGET_BYTES = 4 * 1024**2
TTL_S = 1000
REST_S = 1000.0
PIECE_BYTES = 512  # so that small content comes in several pieces
KEYED, OTHER_KEY = AesGcmCodec(b"k" * 32), AesGcmCodec(b"o" * 32)
COUNTS = ("hits", "misses", "saved", "evictions", "errors", "dropped", "spoiled", "read_bytes", "saved_bytes")

THINGS = Kind(
    name="things",
    format=7,
    said="things in {}",
    counters={name: LabelledCounter(f"test_{name}", "Of a test.", ("place",)) for name in COUNTS},
    rejected="spoiled",
    disk_budget="store_disk_bytes",
    suffix=".thing",
)
"""A kind that the package does not know: nothing in the storage is about images or records."""


class Contents(ABC):
    """Content of one kind by number, and how it is put and found."""

    kind: Kind
    is_streamed = True

    @abstractmethod
    def key(self, number: int) -> bytes:
        """Its key."""

    @abstractmethod
    def content(self, number: int) -> bytes:
        """What must come back."""

    @abstractmethod
    def entry(self, key: int, number: int) -> bytes:
        """The plain bytes of a whole entry under the key of one number with the content of another."""

    @abstractmethod
    def put(self, tier: Tier, number: int) -> bool:
        """Put it; whether it is kept."""

    @abstractmethod
    def find(self, tier: Tier, number: int, seconds: float = LONG_S) -> bytes | None:
        """What the tier has."""

    @abstractmethod
    def check(self, name: bytes, content: bytearray) -> None:
        """As Tier.check wants it."""


class Packages(Contents):
    kind = tiers.FEATURES

    def key(self, number: int) -> bytes:
        return tiers.key_of(identity(number))

    def content(self, number: int) -> bytes:
        return bytes(features(number))

    def entry(self, key: int, number: int) -> bytes:
        return pack(identity(key), SHAPE, features(number))

    def put(self, tier: Tier, number: int) -> bool:
        return save_package(tier, number)

    def find(self, tier: Tier, number: int, seconds: float = LONG_S) -> bytes | None:
        room = memoryview(bytearray(SHAPE.num_bytes))
        filled = tiers.load(tier, identity(number), SHAPE, lambda: room, now() + seconds)
        return bytes(room) if filled else None

    def check(self, name: bytes, content: bytearray) -> None:
        tiers.check(name, content, PLAIN)


class Values(Contents):
    """Small values in frames."""

    is_streamed = False

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def key(self, number: int) -> bytes:
        return blake3(b"value %d" % number).digest()

    def content(self, number: int) -> bytes:
        return b"%d " % number * 500

    def entry(self, key: int, number: int) -> bytes:
        return frame(self.key(key), self.content(number))

    def put(self, tier: Tier, number: int) -> bool:
        before = tier.counts.snapshot()["saved"]
        tier.put_many({self.key(number): self.content(number)})
        return tier.counts.snapshot()["saved"] > before

    def find(self, tier: Tier, number: int, seconds: float = LONG_S) -> bytes | None:
        hit = tier.get(self.key(number), bytes)
        return None if hit is None else hit[1]

    def check(self, name: bytes, content: bytearray) -> None:
        check(name, content)


class ThingCheck:
    """Checks things as they arrive: the BLAKE3 of the key and the content, then the content."""

    num_head_bytes = 32

    def __init__(self, key: bytes, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._hasher = blake3(key)

    def begin(self, seen: Buffer, num_bytes: int) -> None:
        if num_bytes != 32 + self.num_bytes:
            raise StoreCorrupt("of another length")
        self._digest = bytes(seen[:32])

    def add(self, piece: Buffer) -> None:
        self._hasher.update(piece)

    def end(self) -> None:
        if self._hasher.digest() != self._digest:
            raise StoreCorrupt("of another digest")


class Things(Contents):
    """Streamed content that is nothing known."""

    kind = THINGS

    def key(self, number: int) -> bytes:
        return blake3(b"thing %d" % number).digest()

    def content(self, number: int) -> bytes:
        return b"<%06d>" % number * 300

    def entry(self, key: int, number: int) -> bytes:
        return blake3(self.key(key) + self.content(number)).digest() + self.content(number)

    def put(self, tier: Tier, number: int) -> bool:
        entry = memoryview(self.entry(number, number))
        return tier.put(self.key(number), lambda: [entry[:32], *tier_module.pieces(entry[32:])], len(entry))

    def find(self, tier: Tier, number: int, seconds: float = LONG_S) -> bytes | None:
        room = bytearray(len(self.content(number)))
        checker = ThingCheck(self.key(number), len(room))
        filled = tier.load(self.key(number), checker, lambda: memoryview(room), now() + seconds)
        return bytes(room) if filled else None

    def check(self, name: bytes, content: bytearray) -> None:
        number = int(content[33:39]) if content[33:39].isdigit() else 0
        if content != self.entry(number, number) or name != self.key(number):
            raise StoreCorrupt("no whole thing")


CONTENTS = {"packages": Packages(), "records": Values(RECORDS), "things": Things(), "small things": Values(THINGS)}


class Place(ABC):
    """One place where backends keep entries, and what others may do to it."""

    entry_class: type[Any]
    """Of what the backend opens; each reading of bytes goes through its `read_into`."""
    never: ClassVar[dict[str, str]] = {}
    """Faults that can't happen to this backend, and why: full, read_only, unreachable, not_ours, busy."""
    served_while = frozenset({"full", "read_only", "busy"})
    """Faults in which what was kept can still be read."""
    a_hit_is_a_use = True
    """Whether loading streamed content keeps it for another `ttl_s`; else only putting it again does."""
    usual_bytes = 8000
    """Of an entry, such that a budget of 256 KiB is kept well."""
    overshoot_bytes = 0
    """By how much one write may go beyond the budget."""
    has_values_at_once = False
    """Whether a small value is in memory when it is opened, so that nothing can happen while it is read."""
    empty_is_a_miss = False
    """Whether an entry of no bytes is none, rather than a damaged one."""

    @abstractmethod
    def backend(self, kind: Kind, *, ttl_s: int = 0, budget_bytes: int = BUDGET_BYTES) -> Backend:
        """One more backend over this place, as another process or machine has it."""

    @abstractmethod
    def write(self, kind: Kind, name: bytes, content: bytes) -> None:
        """Write `content` under `name`, over what is there, as another program does."""

    @abstractmethod
    def read(self, kind: Kind, name: bytes) -> bytes | None:
        """What lies under `name`."""

    @abstractmethod
    def age(self, kind: Kind, name: bytes, seconds: float) -> None:
        """As if so much time had gone by for this entry."""

    @abstractmethod
    def lay_strangers(self, kind: Kind) -> None:
        """Put there what is not ours, beside the entries, under names that look like ours."""

    @abstractmethod
    def strangers(self, kind: Kind) -> int:
        """How much of that is still there as it was."""

    @abstractmethod
    def remove(self) -> None:
        """Remove everything under the backends, as an operator may."""

    @abstractmethod
    def full(self, backend: Backend) -> AbstractContextManager[object]:
        """There is no room within."""

    @abstractmethod
    def read_only(self, backend: Backend) -> AbstractContextManager[object]:
        """Nothing can be changed within."""

    @abstractmethod
    def unreachable(self, backend: Backend) -> AbstractContextManager[object]:
        """The place is not there, and can't be made, within; afterwards it may be empty."""

    @abstractmethod
    def not_ours(self, backend: Backend) -> AbstractContextManager[object]:
        """The place is another user's, or we may not use it, within."""

    @abstractmethod
    def busy(self, backend: Backend) -> AbstractContextManager[object]:
        """Another one works on it for longer than anybody waits, within."""


class DirectoryPlace(Place):
    """A place in a directory of this machine, `store`."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self._strangers: list[Path] = []

    @abstractmethod
    def folder_of(self, backend: Backend) -> Path:
        """The folder of the backend's kind."""

    @abstractmethod
    def stranger_paths(self, kind: Kind) -> list[Path]:
        """Names that look like ours, beside the entries."""

    def lay_strangers(self, kind: Kind) -> None:
        self._strangers = self.stranger_paths(kind)
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
        folder, elsewhere = self.folder_of(backend), self.store / "elsewhere"
        folder.rename(elsewhere)
        folder.symlink_to(elsewhere)
        yield
        folder.unlink()
        elsewhere.rename(folder)


class Clock:
    """The clock of tiers and breakers; the test says when time passes."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


def now() -> float:
    """As tiers see it."""
    return float(vars(tier_module)["time"].monotonic())


class Killed(BaseException):
    """As a process ends at any moment."""


def counts(tier: Tier) -> dict[str, float]:
    """What the tier has counted; `rejected` is what its kind calls so."""
    found = tier.counts.snapshot()
    return {name: found.get(name, 0) for name in COUNTS} | {"rejected": found[tier.kind.rejected]}


def counted(tier: Tier, **expected: float) -> bool:
    """Whether exactly this was counted, of what is an outcome."""
    outcomes = {name: counts(tier)[name] for name in ("hits", "misses", "saved", "errors", "dropped", "rejected")}
    assert outcomes == dict.fromkeys(outcomes, 0) | expected
    return True


@contextmanager
def during(place: Place, what: Callable[[int], object]) -> Iterator[None]:
    """Run `what` with the offset before each read of an entry within."""
    read_into = place.entry_class.read_into

    def instead(self: Any, offset: int, buffer: memoryview, until: float = 0.0) -> None:
        what(offset)
        read_into(self, offset, buffer, until)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place.entry_class, "read_into", instead)
        yield


def comes_in_pieces(place: Place, contents: Contents) -> None:
    """Skip a test of what happens while an entry is read, where nothing can."""
    if place.has_values_at_once and not contents.is_streamed:
        pytest.skip("a value is in memory when it is opened")


def flipped(entry: bytes, at: int, bit: int = 0) -> bytes:
    """The entry with one bit changed, of the byte at that place."""
    changed = bytearray(entry)
    changed[at] ^= 1 << bit
    return bytes(changed)


DAMAGE: dict[str, Callable[[Contents], bytes]] = {
    "empty": lambda one: b"",
    "one byte": lambda one: one.entry(0, 0)[:1],
    "cut at the end": lambda one: one.entry(0, 0)[:-1],
    "cut in the middle": lambda one: one.entry(0, 0)[: len(one.entry(0, 0)) // 2],
    "longer": lambda one: one.entry(0, 0) + b"x",
    "first bit": lambda one: flipped(one.entry(0, 0), 0),
    "a bit of the head": lambda one: flipped(one.entry(0, 0), 25),
    "last bit": lambda one: flipped(one.entry(0, 0), -1),
    "noughts": lambda one: bytes(len(one.entry(0, 0))),
    "foreign": lambda one: b"\x89PNG foreign" * 100,
    "another entry": lambda one: one.entry(1, 1),
    "another version's": lambda one: (
        one.entry(0, 0).replace(FORMAT.encode(), FORMAT[:-1].encode() + b"1").replace(b"mmcr\1", b"mmcr\2")
        if one.kind is not THINGS or not one.is_streamed
        else b"other" + one.entry(0, 0)
    ),
    "encrypted": lambda one: KEYED.encrypt_bytes(one.key(0), one.entry(0, 0)),
    "a long header": lambda one: (2**20 + 8).to_bytes(8, "little") + b"{" * 2**20,
    "huge": lambda one: one.entry(0, 0) + bytes(10 * MAX_VALUE_BYTES),
}

USED = ("packages", "records")


class StorageContract:
    """The tests; a subclass gives `place`."""

    # The two kinds that are in use would double the time of the fast tests, and the other two show most of it.
    @pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) if name in USED else name for name in CONTENTS])
    def contents(self, request: pytest.FixtureRequest) -> Contents:
        return CONTENTS[request.param]

    @pytest.fixture(autouse=True)
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        clock = Clock()
        module = SimpleNamespace(monotonic=clock.monotonic, perf_counter=time.perf_counter)
        monkeypatch.setattr(breaker, "time", module)
        monkeypatch.setattr(tier_module, "time", module)
        monkeypatch.setattr(tier_module, "PIECE_BYTES", PIECE_BYTES)
        return clock

    @pytest.fixture
    def opened(self, place: Place, contents: Contents) -> Iterator[Callable[..., Tier]]:
        """Opens tiers, each with a backend of its own."""
        made: list[Tier] = []

        def open_tier(codec: PlainCodec = PLAIN, rest_s: float = REST_S, **options: int) -> Tier:
            made.append(Tier(contents.kind, place.backend(contents.kind, **options), codec, (rest_s, rest_s)))
            return made[-1]

        yield open_tier
        for tier in made:
            tier.close()

    @pytest.fixture
    def tier(self, opened: Callable[..., Tier]) -> Tier:
        return opened()

    # What is put is found, and nothing else.

    @pytest.mark.parametrize("codec", [PLAIN, KEYED], ids=["plain", "encrypted"])
    def test_it_is_found_by_a_later_process(
        self, contents: Contents, opened: Callable[..., Tier], codec: PlainCodec
    ) -> None:
        tier = opened(codec)
        assert contents.find(tier, 0) is None
        assert all(contents.put(tier, number) for number in range(3))
        tier.close()
        later = opened(codec)
        assert [contents.find(later, number) for number in range(3)] == [contents.content(n) for n in range(3)]
        assert contents.find(later, 3) is None
        assert counted(tier, misses=1, saved=3)
        assert counted(later, hits=3, misses=1)
        assert contents.find(tier, 0) == contents.content(0)  # closed, and opened anew
        assert contents.put(tier, 4)

    def test_two_at_once(self, contents: Contents, opened: Callable[..., Tier]) -> None:
        """Each finds what the other has put, in any order, also what the other has removed and put again."""
        one, other = opened(), opened()
        assert contents.find(one, 0) is contents.find(other, 0) is None
        for number, (writer, reader) in enumerate([(one, other), (other, one)]):
            assert contents.put(writer, number)
            assert contents.find(reader, number) == contents.content(number)
            assert contents.find(writer, number) == contents.content(number)
        one.backend.clear()
        assert contents.find(other, 0) is None
        assert contents.put(other, 0)
        assert contents.find(one, 0) == contents.content(0)
        assert counts(one)["errors"] == counts(other)["errors"] == 0

    def test_the_plain_bytes_are_those_that_were_put(self, place: Place, contents: Contents, tier: Tier) -> None:
        assert contents.put(tier, 0)
        assert place.read(contents.kind, contents.key(0)) == contents.entry(0, 0)

    def test_what_is_encrypted_shows_neither_content_nor_name(
        self, place: Place, contents: Contents, opened: Callable[..., Tier]
    ) -> None:
        tier = opened(KEYED)
        assert contents.put(tier, 0)
        key = contents.key(0)
        assert place.read(contents.kind, key) is None
        entry = place.read(contents.kind, KEYED.name(key))
        assert entry is not None
        assert len(entry) == KEYED.num_bytes(len(contents.entry(0, 0)))
        assert contents.content(0)[:20] not in entry

    def test_what_is_put_again(self, contents: Contents, tier: Tier) -> None:
        assert contents.put(tier, 0)
        contents.put(tier, 0)
        assert contents.find(tier, 0) == contents.content(0)
        assert tier.backend.sizes()[0] == 1
        assert counted(tier, hits=1, saved=1 if contents.is_streamed else 2)  # what is large is not written again

    def test_nothing_to_put(self, contents: Contents, tier: Tier) -> None:
        tier.put_many({})
        assert counted(tier)

    def test_what_is_too_large_is_dropped(self, contents: Contents, tier: Tier) -> None:
        if not contents.is_streamed:
            pytest.skip("RecordStore keeps no value that is too large for every tier")
        assert not tier.put(contents.key(0), lambda: pytest.fail("asked for it"), tier.max_bytes + 1)
        assert counted(tier, dropped=1)

    # What is none of ours is never served.

    @pytest.mark.parametrize("damage", DAMAGE)
    @pytest.mark.parametrize("codec", [PLAIN, KEYED], ids=["plain", "encrypted"])
    def test_damaged_content_is_a_miss(
        self, place: Place, contents: Contents, opened: Callable[..., Tier], damage: str, codec: PlainCodec
    ) -> None:
        tier = opened(codec)
        assert contents.put(tier, 0)
        assert contents.put(tier, 1)
        assert contents.find(tier, 0) == contents.content(0)
        place.write(contents.kind, codec.name(contents.key(0)), DAMAGE[damage](contents))
        assert contents.find(tier, 0) is None
        is_rejected = not (damage == "empty" and place.empty_is_a_miss)
        assert counted(tier, hits=1, misses=1, saved=2, rejected=is_rejected)
        assert contents.find(tier, 0) is None
        if contents.is_streamed:  # it was taken out of service
            assert counted(tier, hits=1, misses=2, saved=2, rejected=is_rejected)
        assert contents.find(tier, 1) == contents.content(1)
        assert contents.put(tier, 0)
        assert contents.find(tier, 0) == contents.content(0)

    @pytest.mark.parametrize(
        ("written", "asked"),
        [(PLAIN, KEYED), (KEYED, PLAIN), (OTHER_KEY, KEYED), (KEYED, KEYED)],
        ids=["plain, a key", "a key, plain", "another key", "the same"],
    )
    @pytest.mark.parametrize("planted", [False, True], ids=["as it was put", "under the name that is asked for"])
    def test_each_key_has_entries_of_its_own(
        self,
        place: Place,
        contents: Contents,
        opened: Callable[..., Tier],
        written: PlainCodec,
        asked: PlainCodec,
        planted: bool,
    ) -> None:
        writer, reader = opened(written), opened(asked)
        name = written.name(contents.key(0))
        assert contents.put(writer, 0)
        if planted:
            entry = place.read(contents.kind, name)
            assert entry is not None
            place.write(contents.kind, asked.name(contents.key(0)), entry)
        expected = contents.content(0) if written is asked else None
        assert contents.find(reader, 0) == expected
        assert contents.find(writer, 0) == contents.content(0)
        assert counts(reader)["rejected"] == (planted and written is not asked)

    def test_strangers_are_left_alone(self, place: Place, contents: Contents, tier: Tier) -> None:
        assert contents.put(tier, 0)
        place.lay_strangers(contents.kind)
        num_strangers = place.strangers(contents.kind)
        assert num_strangers
        assert [info.name for info in tier.backend.scan()] == [contents.key(0)]
        assert tier.check(contents.check) == (1, [])
        tier.backend.sweep()
        assert contents.find(tier, 0) == contents.content(0)
        assert contents.put(tier, 1)
        assert place.strangers(contents.kind) == num_strangers
        assert counts(tier)["errors"] == counts(tier)["rejected"] == 0

    def test_kinds_have_entries_of_their_own(self, place: Place, contents: Contents, tier: Tier) -> None:
        """Under the same name, even."""
        name = contents.key(0)
        assert contents.put(tier, 0)
        for other in (tiers.FEATURES, RECORDS, THINGS):
            if other is not contents.kind:
                with opened_backend(place, other) as backend:
                    assert not backend.touch(name)
                    backend.put_many({name: b"of another kind"})
                    assert backend.sizes()[0] == 1
                    backend.clear()
        assert contents.find(tier, 0) == contents.content(0)

    # As a whole, or not at all.

    @pytest.mark.parametrize("error", [Killed, RuntimeError, OSError])
    def test_a_writer_that_ends_halfway_leaves_nothing(
        self, place: Place, contents: Contents, tier: Tier, error: type[BaseException]
    ) -> None:
        entry, name = contents.entry(0, 0), contents.key(0)
        assert contents.put(tier, 1)

        def parts() -> Iterator[bytes]:
            yield entry[:100]
            raise error

        with pytest.raises(error), opened_backend(place, contents.kind) as backend:
            backend.put(name, parts(), len(entry))
        assert place.read(contents.kind, name) is None
        assert contents.find(tier, 0) is None
        assert [info.name for info in tier.backend.scan()] == [contents.key(1)]
        assert contents.put(tier, 0)
        assert contents.find(tier, 0) == contents.content(0)
        assert counts(tier)["rejected"] == 0

    def test_nobody_sees_half_of_it(self, place: Place, contents: Contents, tier: Tier) -> None:
        seen: list[object] = []

        def parts() -> Iterator[bytes]:
            entry = contents.entry(0, 0)
            for start in range(0, len(entry), 400):
                yield entry[start : start + 400]
                seen.append((contents.find(tier, 0), [*tier.backend.scan()]))

        with opened_backend(place, contents.kind) as backend:
            backend.put(contents.key(0), parts(), len(contents.entry(0, 0)))
        assert seen == [(None, [])] * len(seen)
        assert len(seen) > 2
        assert contents.find(tier, 0) == contents.content(0)

    def test_replaced_while_it_is_read(self, place: Place, contents: Contents, opened: Callable[..., Tier]) -> None:
        """A reader has one of the two, or nothing; what is there now stays, of which nothing bad is known."""
        comes_in_pieces(place, contents)
        tier, other = opened(), opened()
        assert contents.put(tier, 0)
        new = contents.entry(0, 1)

        def replace(offset: int) -> None:
            if offset > PIECE_BYTES or not contents.is_streamed:
                other.backend.reject(contents.key(0))
                other.backend.put(contents.key(0), [new], len(new))

        with during(place, replace):
            assert contents.find(tier, 0) in (contents.content(0), contents.content(1), None)
        assert counts(tier)["rejected"] == 0
        assert contents.find(tier, 0) == contents.content(1)

    def test_removed_while_it_is_read(self, place: Place, contents: Contents, opened: Callable[..., Tier]) -> None:
        comes_in_pieces(place, contents)
        tier, other = opened(), opened()
        assert contents.put(tier, 0)
        with during(place, lambda offset: other.backend.clear()):
            assert contents.find(tier, 0) in (contents.content(0), None)
        assert contents.find(tier, 0) is None
        assert counts(tier)["rejected"] == counts(tier)["errors"] == 0

    @pytest.mark.slow
    def test_many_threads_and_two_backends(self, contents: Contents, opened: Callable[..., Tier]) -> None:
        """Reading, writing, rejecting and clearing, all at once."""
        wrong: list[object] = []
        both = [opened(), opened()]

        def work(tier: Tier, first: int) -> None:
            for step in range(60):
                number = (step + first) % 20
                contents.put(tier, number)
                if step % 7 == 0:
                    tier.backend.reject(contents.key(number))
                if contents.find(tier, number) not in (contents.content(number), None):
                    wrong.append(number)
                if step % 29 == 0:
                    tier.backend.clear()

        threads = [threading.Thread(target=work, args=(both[n % 2], n * 3)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert [counts(tier)["rejected"] for tier in both] == [0, 0]
        assert all(contents.put(tier, number) for number, tier in enumerate(both) if not tier._writing.is_open())

    # The backend's own methods, which the command line uses.

    def test_before_the_first_entry(self, place: Place, contents: Contents, opened: Callable[..., Tier]) -> None:
        """Whatever is asked for, nothing is made."""
        tier = opened(ttl_s=TTL_S)
        backend = tier.backend
        assert [*backend.scan()] == []
        assert (backend.sizes(), backend.num_rejected(), backend.verify()) == ((0, 0), 0, None)
        assert backend.sweep().num_evicted == 0
        tier.tidy()
        backend.reject(contents.key(0))
        assert not backend.touch(contents.key(0))
        assert backend.clear() == 0
        assert not place.backend(contents.kind).is_there() or backend.is_shared
        assert counted(tier)

    def test_scan_and_sizes(self, contents: Contents, tier: Tier) -> None:
        before = time.time()
        assert all(contents.put(tier, number) for number in range(5))
        infos = {info.name: info for info in tier.backend.scan()}
        assert infos.keys() == {contents.key(number) for number in range(5)}
        assert {info.num_bytes for info in infos.values()} == {len(contents.entry(0, 0))}
        assert all(info.used_s == 0 or before - 2 < info.used_s <= time.time() + 1 for info in infos.values())
        num_entries, num_bytes = tier.backend.sizes()
        assert num_entries == 5
        assert num_bytes >= 5 * len(contents.entry(0, 0))
        assert tier.backend.is_there()

    def test_an_open_entry(self, contents: Contents, tier: Tier) -> None:
        assert contents.put(tier, 0)
        entry = contents.entry(0, 0)
        with tier.backend.open(contents.key(0)) as found:
            assert found is not None
            assert found.num_bytes == len(entry)
            for start, end in ((0, 7), (100, 700), (len(entry) - 1, len(entry))):
                piece = bytearray(end - start)
                found.read_into(start, memoryview(piece), time.monotonic() + LONG_S)
                assert piece == entry[start:end]
            with pytest.raises(StoreCorrupt):
                found.read_into(len(entry) - 3, memoryview(bytearray(4)), time.monotonic() + LONG_S)
            assert found.is_current()
            assert found.written_s == 0 or time.time() - LONG_S < found.written_s < time.time() + 2
            found.mark_used()
        with tier.backend.open(contents.key(1)) as found:
            assert found is None

    def test_an_entry_that_is_removed_while_it_is_open(self, contents: Contents, tier: Tier) -> None:
        assert contents.put(tier, 0)
        with tier.backend.open(contents.key(0)) as found:
            assert found is not None
            if isinstance(found, BytesEntry):
                pytest.skip("all bytes are in memory when it is opened")
            found.read_into(0, memoryview(bytearray(8)), time.monotonic() + LONG_S)
            tier.backend.reject(contents.key(0))
            assert not found.is_current()

    def test_any_name(self, place: Place, contents: Contents, tier: Tier) -> None:
        names = [bytes(32), b"\xff" * 32, b"/../" * 8, b"*?[]{}\r\n" * 4, *(secrets.token_bytes(32) for _ in range(20))]
        usage = tier.backend.put_many({name: b"of " + name for name in names})
        assert usage.num_evicted == 0
        assert {info.name for info in tier.backend.scan()} == set(names)
        for name in names:
            assert place.read(contents.kind, name) == b"of " + name
            assert tier.backend.touch(name)
        tier.backend.put_many(dict.fromkeys(names[:2], b"another"))
        assert [place.read(contents.kind, name) for name in names[:3]] == [b"another", b"another", b"of " + names[2]]
        assert sorted(name for group in tier.backend.groups(names) for name in group) == sorted(names)

    def test_reject(self, contents: Contents, tier: Tier) -> None:
        assert contents.put(tier, 0)
        assert contents.put(tier, 1)
        tier.backend.reject(contents.key(0))
        tier.backend.reject(contents.key(0))  # somebody else was faster
        tier.backend.reject(contents.key(2))
        assert contents.find(tier, 0) is None
        assert contents.find(tier, 1) == contents.content(1)
        assert [info.name for info in tier.backend.scan()] == [contents.key(1)]
        assert tier.backend.sizes()[0] == 1
        assert not tier.backend.touch(contents.key(0))
        assert tier.backend.num_rejected() <= 1

    def test_clear(self, contents: Contents, opened: Callable[..., Tier]) -> None:
        tier, other = opened(), opened()
        assert all(contents.put(tier, number) for number in range(3))
        assert contents.find(other, 0) == contents.content(0)
        num, num_bytes = tier.backend.to_clear()
        assert num_bytes >= 3 * len(contents.content(0))
        assert contents.find(other, 0) == contents.content(0), "it has only been looked at"
        assert tier.backend.clear() == num >= 1
        assert tier.backend.to_clear() == (0, 0)
        for one in (tier, other):
            assert contents.find(one, 0) is None
        assert tier.backend.sizes()[0] == 0
        assert contents.put(tier, 0)
        tier.clear()  # as a server does it at the user's word: what other machines share stays
        assert (contents.find(other, 0) is not None) == tier.backend.is_shared

    def test_check_takes_out_what_is_damaged(self, place: Place, contents: Contents, tier: Tier) -> None:
        for number in range(4):
            assert contents.put(tier, number)
        kind, entry = contents.kind, contents.entry(0, 0)
        place.write(kind, contents.key(0), flipped(entry, len(entry) // 2))
        place.write(kind, contents.key(1), KEYED.encrypt_bytes(contents.key(1), contents.entry(1, 1)))
        num_good, bad = tier.check(contents.check)
        assert (num_good, [name for name, _ in bad]) == (2, [contents.key(0).hex()])
        assert all(why for _, why in bad)
        assert tier.check(contents.check) == (2, [])
        assert place.read(kind, contents.key(1)) is not None  # another key's: left alone
        assert tier.backend.verify() is None

    def test_removed_under_way(self, place: Place, contents: Contents, opened: Callable[..., Tier]) -> None:
        """Everything is gone, and whoever comes next makes it again."""
        tier, other = opened(), opened()
        assert contents.put(tier, 0)
        assert contents.find(other, 0) == contents.content(0)
        place.remove()
        for one in (tier, other):
            assert contents.find(one, 0) is None
        assert contents.put(other, 1)
        assert contents.find(tier, 1) == contents.content(1)
        assert counts(tier)["errors"] == counts(other)["errors"] == 0

    # Time to live, and budget.

    @pytest.mark.parametrize("ttl_s", [TTL_S, 0])
    def test_what_is_used_stays_and_the_rest_goes(
        self, place: Place, contents: Contents, opened: Callable[..., Tier], ttl_s: int
    ) -> None:
        tier = opened(ttl_s=ttl_s)
        names = [contents.key(number) for number in range(4)]
        assert all(contents.put(tier, number) for number in range(3))
        for name in names[:3]:
            place.age(contents.kind, name, 0.6 * TTL_S)
        assert contents.find(tier, 0) == contents.content(0)  # a hit
        contents.put(tier, 1)  # put again
        assert contents.put(tier, 3)
        for name in names[:3]:
            place.age(contents.kind, name, 0.6 * TTL_S)
        tier.tidy()
        hit_stays = ttl_s == 0 or (contents.is_streamed and place.a_hit_is_a_use)
        there = [place.read(contents.kind, name) is not None for name in names]
        assert there == [hit_stays, True, ttl_s == 0, True]
        assert counts(tier)["errors"] == 0

    def test_never_above_the_budget(self, place: Place, contents: Contents, opened: Callable[..., Tier]) -> None:
        budget_bytes = 256 * 1024
        tier = opened(budget_bytes=budget_bytes)
        if tier.backend.budget_bytes is None:
            pytest.skip("the budget is a server's business")
        evicted, size = 0, place.usual_bytes
        num_entries = 3 * budget_bytes // size // 10 * 5
        for first in range(0, num_entries, 5):
            usage = tier.backend.put_many({contents.key(number): bytes(size) for number in range(first, first + 5)})
            assert usage.held_bytes == tier.backend.sizes()[1] <= budget_bytes + place.overshoot_bytes
            evicted += usage.num_evicted
            for number in range(first, min(first + 5, 20)):  # their order by a clock that counts whole seconds
                place.age(contents.kind, contents.key(number), 1000 - number)
        there = [place.read(contents.kind, contents.key(number)) is not None for number in range(num_entries)]
        assert there.count(True) == num_entries - evicted
        assert there.count(True) * size > 0.5 * budget_bytes
        assert (there[0], there[-1]) == (False, True)
        assert there[:20] == sorted(there[:20])  # the oldest went first
        assert contents.put(tier, 10_000)
        assert counts(tier)["dropped"] == 0
        assert 0 < tier.counts.held_bytes <= budget_bytes + place.overshoot_bytes
        assert tier.size() == (None, tier.counts.held_bytes, budget_bytes)

    def test_a_smaller_budget(self, place: Place, contents: Contents, opened: Callable[..., Tier]) -> None:
        large = opened()
        if large.backend.budget_bytes is None:
            pytest.skip("the budget is a server's business")
        large.backend.put_many({contents.key(number): bytes(8000) for number in range(60)})
        for budget_bytes, tidied in ((300_000, True), (150_000, False)):
            tier = opened(budget_bytes=budget_bytes)
            if tidied:
                assert tier.sweep().num_evicted > 10
                assert tier.sweep().num_evicted == 0
            else:
                assert contents.put(tier, 100)
            assert tier.backend.sizes()[1] <= budget_bytes

    def test_a_budget_for_nothing(self, contents: Contents, opened: Callable[..., Tier]) -> None:
        tier = opened(budget_bytes=1000)
        if tier.backend.budget_bytes is None:
            pytest.skip("the budget is a server's business")
        assert not contents.put(tier, 0)
        assert contents.find(tier, 0) is None
        assert counts(tier)["dropped"] == 1

    # What can't be used is left alone, and is used again when it can be.

    @pytest.mark.parametrize("fault", ["full", "read_only", "unreachable", "not_ours", "busy"])
    def test_what_fails_is_left_alone(
        self,
        place: Place,
        contents: Contents,
        opened: Callable[..., Tier],
        clock: Clock,
        log: pytest.LogCaptureFixture,
        fault: str,
    ) -> None:
        """One error each of reading and writing, one line in the log each, and misses; then it works again."""
        if fault in place.never:
            pytest.skip(place.never[fault])
        log.set_level("INFO", "vllm.mmcache")
        tier = opened()
        assert contents.put(tier, 0)  # the control
        assert contents.find(tier, 0) == contents.content(0)
        reads = fault in place.served_while
        with getattr(place, fault)(tier.backend):
            for number in range(1, 6):
                assert not contents.put(tier, number)
                assert contents.find(tier, 0) == (contents.content(0) if reads and fault != "busy" else None) or (
                    fault == "busy" and contents.find(tier, 0) == contents.content(0)
                )
                assert contents.find(tier, number) is None
            assert tier.is_open() is (not reads)
            assert tier._writing.is_open()
            tier.tidy()
        seen = counts(tier)
        assert (seen["saved"], seen["dropped"], seen["rejected"]) == (1, 5, 0)
        assert seen["errors"] == (1 if reads else 2)
        assert sum("(writing) is off" in line for line in log.messages) == 1
        assert sum("(reading) is off" in line for line in log.messages) == (not reads)
        clock.ahead_s += REST_S + 1
        assert contents.put(tier, 7)
        assert contents.find(tier, 7) == contents.content(7)
        assert counts(tier)["errors"] == seen["errors"]
        assert sum("works again" in line for line in log.messages) == (1 if reads else 2)

    def test_one_read_that_hangs_holds_up_no_other(
        self, place: Place, contents: Contents, tier: Tier, clock: Clock
    ) -> None:
        comes_in_pieces(place, contents)
        for number in range(2):
            assert contents.put(tier, number)
        hangs, goes_on = threading.Event(), threading.Event()
        found: list[bytes | None] = []

        def hang(offset: int) -> None:
            if threading.current_thread() is thread:
                hangs.set()
                assert goes_on.wait(LONG_S)

        thread = threading.Thread(target=lambda: found.append(contents.find(tier, 0, 1000)))
        with during(place, hang):
            thread.start()
            assert hangs.wait(LONG_S)
            assert contents.find(tier, 1) == contents.content(1)
            assert contents.put(tier, 2)
            if contents.is_streamed:
                clock.ahead_s += 1000 + tier_module.HUNG_S
                assert tier.is_open()  # so that no other thread is lost to it
                assert contents.find(tier, 1) is None
                assert contents.put(tier, 3)
                clock.ahead_s = 0
            goes_on.set()
            thread.join()
        assert found == [contents.content(0)]
        assert not tier.is_open()
        assert contents.find(tier, 1) == contents.content(1)

    def test_what_takes_too_long_is_a_miss_in_time(
        self, place: Place, contents: Contents, tier: Tier, clock: Clock
    ) -> None:
        """It is not left alone for that: others decide whether it is of use."""
        if not contents.is_streamed:
            pytest.skip("a value is read at once, and what is slow with it gives up by itself")
        assert contents.put(tier, 0)
        assert contents.find(tier, 0, seconds=-1) is None
        assert counts(tier)["errors"] == 0  # nothing was tried
        offsets: list[int] = []

        def slow(offset: int) -> None:
            offsets.append(offset)
            clock.ahead_s += 0.4 * LONG_S

        with during(place, slow):
            assert contents.find(tier, 0) is None
        assert len(offsets) < 2 + len(contents.content(0)) // PIECE_BYTES
        clock.ahead_s = 0
        assert (counts(tier)["errors"], counts(tier)["rejected"], tier.is_open()) == (1, 0, False)
        assert contents.find(tier, 0) == contents.content(0)


@contextmanager
def opened_backend(place: Place, kind: Kind) -> Iterator[Backend]:
    backend = place.backend(kind)
    try:
        yield backend
    finally:
        backend.close()
