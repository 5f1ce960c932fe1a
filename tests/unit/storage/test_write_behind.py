# SPDX-License-Identifier: Apache-2.0
"""The queue in front of a tier: in which order it is written, and what becomes of it when the tier is slow or hangs."""

from collections.abc import Iterator, Mapping

import pytest

from tests.support.refusals import no_threads
from tests.support.tiers import LONG_S, MemoryTier, within
from vllm_mmcache.base.lru import Budget, Size
from vllm_mmcache.storage import write_behind
from vllm_mmcache.storage.record_store import RECORDS
from vllm_mmcache.storage.write_behind import WriteBehind

PLENTY = Budget(1000, 1 << 20)
Batch = list[tuple[bytes, bytes]]


class Queue:
    """Small values in front of a tier in memory; `batches` has what was written, as it was handed over."""

    def __init__(self, tier: MemoryTier, budget: Budget = PLENTY, batch: Budget = PLENTY) -> None:
        self.tier = tier
        self.batches: list[Batch] = []
        self.waiting = WriteBehind[bytes, bytes](tier, self._write, budget=budget, batch=batch, cost=len)

    def _write(self, items: Mapping[bytes, bytes]) -> None:
        self.batches.append(list(items.items()))
        self.tier.put_many(items)

    def submit(self, *items: tuple[bytes, bytes]) -> None:
        for key, value in items:
            self.waiting.submit(key, value)

    def has_begun(self, *items: tuple[bytes, bytes]) -> None:
        """These are being written, and will be until the gate is open."""
        self.tier.writing.shut()
        self.submit(*items)
        assert self.tier.writing.has_come()

    def goes_on(self) -> None:
        self.tier.writing.open()
        assert self.waiting.flush(LONG_S)

    @property
    def written(self) -> Batch:
        return [item for batch in self.batches for item in batch]


@pytest.fixture
def tier() -> Iterator[MemoryTier]:
    made = MemoryTier(kind=RECORDS)
    yield made
    made.writing.open()


@pytest.fixture
def queue(tier: MemoryTier) -> Iterator[Queue]:
    made = Queue(tier)
    yield made
    tier.writing.open()
    made.waiting.close(LONG_S)


def counts(tier: MemoryTier) -> tuple[float, float, float]:
    seen = tier.counts.snapshot()
    return seen["saved"], seen["dropped"], seen["errors"]


def items(names: str) -> Batch:
    return [(name.encode(), b"value of " + name.encode()) for name in names]


def test_in_the_order_of_arrival(queue: Queue) -> None:
    queue.has_begun(*items("d"))
    queue.submit(*items("afb"))
    assert not queue.waiting.flush(0)
    assert queue.batches == [items("d")]
    queue.goes_on()
    assert queue.written == items("dafb")
    assert counts(queue.tier) == (4, 0, 0)


def test_what_waits_is_replaced_where_it_waits(queue: Queue) -> None:
    queue.has_begun(*items("d"))
    queue.submit(*items("ab"), (b"a", b"a later and longer one"))
    assert queue.waiting.size() == Size(3, len(b"a later and longer one") + len(b"value of b"), PLENTY.size_bytes)
    queue.goes_on()
    assert queue.written == [*items("d"), (b"a", b"a later and longer one"), *items("b")]
    assert queue.waiting.size() == Size(0, 0, PLENTY.size_bytes)


@pytest.mark.parametrize("puts", [["a"], ["a", "a"], ["x"], ["x", "a"], ["x", "x"]])
def test_a_value_that_is_put_again_while_it_is_written(queue: Queue, puts: list[str]) -> None:
    """The same one is not written twice; the last one is what lies there in the end."""
    queue.has_begun((b"key", b"a"))
    queue.submit(*((b"key", value.encode()) for value in puts))
    queue.goes_on()
    assert [value for _, value in queue.written] == ([b"a"] if set(puts) == {"a"} else [b"a", puts[-1].encode()])
    found = queue.tier.get(b"key", bytes)
    assert found is not None
    assert found[1] == puts[-1].encode()


@pytest.mark.parametrize(
    ("batch", "expected"),
    [(Budget(3, 1 << 20), ["abc", "def", "g"]), (Budget(100, 15), ["ab", "cd", "ef", "g"]), (PLENTY, ["abcdefg"])],
    ids=["entries", "bytes", "plenty"],
)
def test_batches(tier: MemoryTier, batch: Budget, expected: list[str]) -> None:
    """A batch ends with the item that makes it too large, so one that alone is too large is written, too."""
    queue = Queue(tier, batch=batch)
    queue.has_begun((b"z", b"first"))
    queue.submit(*items("abcdefg"))
    queue.goes_on()
    assert queue.batches[1:] == [items(names) for names in expected]
    assert queue.waiting.close(LONG_S)


@pytest.mark.parametrize("budget", [Budget(3, 1 << 20), Budget(100, 35)], ids=["entries", "bytes"])
def test_no_more_wait_than_may(tier: MemoryTier, budget: Budget) -> None:
    queue = Queue(tier, budget)
    queue.has_begun((b"z", b"first"))
    queue.submit(*items("abcde"))
    assert queue.waiting.size() == Size(4, 30, budget.size_bytes)
    assert counts(tier) == (0, 2, 0)
    queue.submit((b"b", b"another b"))  # what waits may be replaced all the same
    queue.goes_on()
    assert queue.written == [(b"z", b"first"), *items("a"), (b"b", b"another b"), *items("c")]
    queue.submit(*items("d"))  # there is room again
    assert queue.waiting.close(LONG_S)
    assert queue.written[-1:] == items("d")
    assert counts(tier) == (5, 2, 0)


def test_one_that_would_take_too_much_does_not_replace_what_waits(tier: MemoryTier) -> None:
    queue = Queue(tier, Budget(100, 35))
    queue.has_begun((b"z", b"first"))
    queue.submit(*items("ab"), (b"a", b"v" * 30))
    queue.goes_on()
    assert queue.written[1:] == items("ab")
    assert counts(tier) == (3, 1, 0)
    assert queue.waiting.close(LONG_S)


def test_items_whose_bytes_are_held_elsewhere(tier: MemoryTier) -> None:
    """Their number alone counts."""
    waiting = WriteBehind[bytes, str](tier, lambda items: None, budget=Budget(2, 1), batch=Budget(1, 1))
    assert waiting.size() == Size(0)
    waiting.submit(b"a", "item")
    assert waiting.close(LONG_S)
    assert counts(tier)[1] == 0


def test_a_tier_that_hangs_holds_up_no_other(queue: Queue) -> None:
    """The control: the one that hangs has nothing until it goes on."""
    other = Queue(MemoryTier("other", kind=RECORDS))
    queue.tier.writing.shut()
    for one in (queue, other):
        one.submit(*items("abcd"))
    assert other.waiting.flush(LONG_S)
    assert len(other.tier.packages) == 4
    assert not queue.tier.packages
    assert not queue.waiting.flush(0)
    queue.goes_on()
    assert queue.tier.packages == other.tier.packages
    assert other.waiting.close(LONG_S)


def test_a_tier_that_is_left_alone_has_it_dropped(queue: Queue) -> None:
    queue.tier.open_breakers()
    queue.submit(*items("ab"))
    assert queue.waiting.flush(LONG_S)
    assert (queue.tier.packages, counts(queue.tier)) == ({}, (0, 2, 0))
    queue.tier.close_breakers()
    queue.submit(*items("ab"))
    assert queue.waiting.flush(LONG_S)
    assert counts(queue.tier) == (2, 2, 0)


@pytest.mark.parametrize("broken", [OSError, ZeroDivisionError])
def test_nothing_that_a_tier_raises_ends_the_thread(
    queue: Queue, broken: type[Exception], log: pytest.LogCaptureFixture
) -> None:
    """What the tier says that it can fail with, and a bug of ours."""
    queue.tier.broken = broken
    queue.submit(*items("a"))
    assert queue.waiting.flush(LONG_S)
    queue.tier.broken = None
    queue.tier.close_breakers()
    queue.submit(*items("b"))
    assert queue.waiting.flush(LONG_S)
    assert queue.tier.get(b"b", bytes) is not None
    assert counts(queue.tier) == (1, 1, 1)
    assert len(log.records) == 1


def test_what_waits_can_be_forgotten(queue: Queue) -> None:
    queue.has_begun(*items("a"))
    queue.submit(*items("bc"))
    queue.waiting.forget()
    assert queue.waiting.size() == Size(1, 0, PLENTY.size_bytes)
    queue.submit(*items("d"))
    queue.goes_on()
    assert queue.written == items("ad")


def test_closed_it_takes_no_more(queue: Queue) -> None:
    queue.submit(*items("a"))
    assert queue.waiting.close(LONG_S)
    queue.submit(*items("b"))
    assert queue.waiting.flush(0)
    assert queue.written == items("a")
    assert counts(queue.tier) == (1, 1, 0)
    assert queue.waiting._thread is not None
    assert not queue.waiting._thread.is_alive()


def test_one_that_was_never_used_has_no_thread(queue: Queue) -> None:
    assert queue.waiting.close(0)
    assert queue.waiting._thread is None


def test_closing_does_not_wait_for_a_tier_that_hangs(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over once it has waited for the tier, so it waits no longer for the thread; the rest is dropped."""
    queue.has_begun(*items("a"))
    queue.submit(*items("bc"))
    joined: list[float] = []
    with monkeypatch.context() as patched:
        patched.setattr(queue.waiting._thread, "join", joined.append)
        assert not queue.waiting.close(0.05)
    assert joined == [0]
    assert counts(queue.tier) == (0, 2, 0)
    queue.goes_on()
    assert queue.written == items("a")
    assert counts(queue.tier) == (1, 2, 0)


@pytest.mark.parametrize("closes", [True, False])
def test_no_thread_to_write_with(queue: Queue, closes: bool) -> None:
    """What comes is dropped, and nobody waits for it; later there are threads again."""
    with no_threads():
        queue.submit(*items("ab"))
    assert queue.waiting.size() == Size(0, 0, PLENTY.size_bytes)
    assert queue.waiting.flush(0)
    assert counts(queue.tier) == (0, 2, 0)
    if closes:
        assert queue.waiting.close(0)
        return
    queue.submit(*items("c"))
    assert queue.waiting.flush(LONG_S)
    assert queue.written == items("c")


class Tidied(MemoryTier):
    """Counts how often it was tidied."""

    def __init__(self, ttl_s: int) -> None:
        super().__init__(kind=RECORDS)
        self.memory.ttl_s = ttl_s
        self.num_tidied = 0

    def tidy(self) -> None:
        self.num_tidied += 1


def test_it_tidies_when_it_starts_and_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks for anything; where nothing expires, no thread is started for it."""
    monkeypatch.setattr(write_behind, "TIDY_S", 0.01)
    tier, for_ever = Tidied(1000), Tidied(0)
    queues = Queue(tier), Queue(for_ever)
    assert within(LONG_S, lambda: tier.num_tidied > 3)
    assert queues[1].waiting._thread is None
    assert for_ever.num_tidied == 0
    assert [queue.waiting.close(LONG_S) for queue in queues] == [True, True]


def test_no_thread_to_tidy_with() -> None:
    """The first item that is to be written has one started."""
    tier = Tidied(1000)
    with no_threads():
        queue = Queue(tier)
    queue.submit(*items("a"))
    assert queue.waiting.close(LONG_S)
    assert (queue.written, tier.num_tidied) == (items("a"), 1)


def test_it_tidies_while_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is always something to write; a quarter of the time that entries live is often enough."""
    now = [0.0]
    monkeypatch.setattr(write_behind, "monotonic", lambda: now[0])
    tier = Tidied(1000)
    queue = Queue(tier)
    assert within(LONG_S, lambda: tier.num_tidied == 1)
    tidied = []
    for seconds, name in ((249, "a"), (2, "b"), (2, "c")):
        now[0] += seconds
        queue.has_begun(*items(name))
        tidied.append(tier.num_tidied)
        queue.goes_on()
    assert tidied == [1, 1, 2]
    assert queue.waiting.close(LONG_S)
