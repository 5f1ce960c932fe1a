# SPDX-License-Identifier: Apache-2.0
"""The store over its tiers: order of lookup, filling upwards, writing behind, and never waiting."""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings as hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.support.packages import SHAPE, features, file_tier, identity, load, packed, save
from tests.support.sizes import scaled
from tests.support.tiers import LONG_S, MemoryTier, within
from tests.unit.components.features.test_package import HOSTILE
from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.engine import cost_model
from vllm_mmcache.components.features.engine import store as store_module
from vllm_mmcache.components.features.engine.cost_model import CostModel
from vllm_mmcache.components.features.engine.ram_tier import ALIGN_BYTES, RamTier, Slot
from vllm_mmcache.components.features.engine.store import MAX_IDENTIFIER_CHARS, Fetch, Store
from vllm_mmcache.components.features.identity import Identity
from vllm_mmcache.components.features.package import Shape
from vllm_mmcache.components.features.tiers import key_of
from vllm_mmcache.storage.files import FileBackend
from vllm_mmcache.storage.tier import Tier

Open = Callable[..., Store]
TTL_S = 1000
ARENA_BYTES = 64 * ALIGN_BYTES


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens stores over tiers, each with memory of its own."""
    made: list[tuple[Store, Arena]] = []

    def open_store(
        *below: Tier,
        num_bytes: int = ARENA_BYTES,
        keeps: bool = True,
        tower: Callable[[int], float | None] = lambda num_tokens: None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> Store:
        arena = Arena.create(num_bytes, 1)
        counters = [tier.counts for tier in below]
        one = Store(arena, RamTier(num_bytes, keeps), below, CostModel(tower, None, counters, clock))
        made.append((one, arena))
        return one

    yield open_store
    for one, arena in made:
        for tier in one.below:
            if isinstance(tier, MemoryTier):
                tier.reading.open()
                tier.writing.open()
        one.close(LONG_S)
        arena.close()


def buffer(store: Store, slot: Slot, shape: Shape = SHAPE) -> memoryview:
    return store._arena.buffer(slot.offset, shape.num_bytes)


def put(store: Store, number: int, asked: Identity | None = None) -> bool:
    """As a rank does it; whether there was room."""
    asked = asked or identity(number)
    slot = store.reserve(asked, SHAPE)
    if slot is not None:
        buffer(store, slot)[:] = features(number)
        store.keep(slot, asked, SHAPE)
    return slot is not None


def found(store: Store, number: int, asked: Identity | None = None) -> bytes | None:
    """What is in RAM."""
    slot = store.find(asked or identity(number), SHAPE)
    if slot is None:
        return None
    seen = bytes(buffer(store, slot))
    store.release(slot)
    return seen


def fetched(store: Store, number: int, asked: Identity | None = None) -> bytes | None:
    """What some tier has."""
    fetch = store.fetch(asked or identity(number), SHAPE)
    assert store.wait([fetch], LONG_S)
    seen = found(store, number, asked)
    assert (seen is not None) == bool(fetch.source)
    return seen


def counts(store: Store, name: str) -> dict[str, float]:
    return {tier: every[name] for tier, every in store.counts().items()}


def path_of(tier: Tier, number: int) -> Path:
    assert isinstance(tier.backend, FileBackend)
    return tier.backend.path_of(key_of(identity(number)))


def age(path: Path) -> None:
    """As if it was last used before TTL_S began."""
    then = time.time() - 1.5 * TTL_S
    os.utime(path, (then, then))


def num_readers(store: Store, tier: MemoryTier) -> int:
    """How many threads read from a tier at a time, as the machine has cores for them."""
    return store._readers[tier.name]._count


@pytest.mark.parametrize("is_urgent", ["from the start", "later", "never"])
def test_what_a_request_waits_for_comes_first(opened: Open, is_urgent: str) -> None:
    """Before what was asked for earlier, for later; the control comes after that."""
    tier = MemoryTier()
    one = opened(tier)
    numbers = range(num_readers(one, tier) + 4)
    for number in numbers:
        assert put(one, number)
    assert one.flush(LONG_S)
    one.ram.clear()
    tier.reading.shut()
    fetches = [one.fetch(identity(number), SHAPE) for number in numbers[:-1]]
    fetches.append(one.fetch(identity(numbers[-1]), SHAPE, is_urgent=is_urgent == "from the start"))
    if is_urgent == "later":
        assert one.fetch(identity(numbers[-1]), SHAPE, is_urgent=True) is fetches[-1]
    order: list[Fetch] = []
    finish = one._finish

    def noted(fetch: Fetch | None, source: str) -> None:
        if fetch is not None:
            order.append(fetch)
        finish(fetch, source)

    one._finish = noted  # type: ignore[method-assign]
    tier.reading.open()
    assert one.wait(fetches, LONG_S)
    is_early = order.index(fetches[-1]) < len(numbers) - 2
    assert is_early == (is_urgent != "never")


@pytest.mark.parametrize("field", ["identifier", "model", "processor", "dtype", "layout"])
def test_another_identity_misses(opened: Open, tmp_path: Path, field: str) -> None:
    stores = [opened(file_tier(tmp_path)) for _ in range(2)]
    assert put(stores[0], 0)
    assert stores[0].flush(LONG_S)
    other = replace(identity(), **{field: "other"})
    for store in stores:  # in RAM, and on disk
        assert fetched(store, 0, other) is None
        assert fetched(store, 0) == features(0)


def test_another_shape_misses(opened: Open, tmp_path: Path) -> None:
    """Under the same identity; the bytes of one shape are never given as another."""
    stores = [opened(file_tier(tmp_path)) for _ in range(2)]
    assert put(stores[0], 0)
    assert stores[0].flush(LONG_S)
    for other in (replace(SHAPE, num_tokens=15), replace(SHAPE, num_tokens=17)):
        assert stores[0].find(identity(), other) is None
        assert stores[0].reserve(identity(), other) is None
    assert found(stores[0], 0) == features(0)
    fetch = stores[1].fetch(identity(), replace(SHAPE, num_tokens=15))
    assert stores[1].wait([fetch], LONG_S)
    assert not fetch.source
    assert counts(stores[1], "set_aside")["disk"] == 1


@pytest.mark.parametrize("identifier", HOSTILE)
def test_hostile_identifiers(opened: Open, tmp_path: Path, identifier: str) -> None:
    """One that is too long is kept nowhere, and asked for nowhere."""
    asked = replace(identity(), identifier=identifier)
    kept = len(identifier) <= MAX_IDENTIFIER_CHARS
    first, second = (opened(file_tier(tmp_path)) for _ in range(2))
    assert put(first, 0, asked) == kept
    assert first.flush(LONG_S)
    assert counts(first, "dropped") == {"ram": not kept, "disk": 0}
    assert fetched(second, 0, asked) == (features(0) if kept else None)
    assert counts(second, "hits")["disk"] == kept
    assert counts(second, "misses")["disk"] == 0
    files = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert files == ({f"{asked.key}.safetensors", "lock"} if kept else set())


def test_a_fetch_under_way_is_joined(opened: Open) -> None:
    """The tier is asked once, whoever wants it; the control: once it was done, a miss is looked for anew."""
    tier = MemoryTier()
    store = opened(tier)
    save(tier, 0)
    tier.reading.shut()
    fetch = store.fetch(identity(), SHAPE)
    assert tier.reading.has_come()
    assert store.fetch(identity(), SHAPE) is fetch
    assert store.fetch(identity(1), SHAPE) is not fetch
    assert not fetch.is_done
    assert not store.wait([fetch], 0.01)
    tier.reading.open()
    assert store.wait([fetch], LONG_S)
    assert fetch.source == "memory"
    again = store.fetch(identity(), SHAPE)
    assert again is not fetch
    assert (again.is_done, again.source) == (True, "ram")
    assert counts(store, "hits") == {"ram": 0, "memory": 1}  # that RAM has it is no use of it yet


@pytest.mark.parametrize("fills", [True, False])
def test_what_a_rank_is_filling_is_waited_for(opened: Open, fills: bool) -> None:
    tier = MemoryTier()
    store = opened(tier)
    slot = store.reserve(identity(), SHAPE)
    assert slot is not None
    assert store.reserve(identity(), SHAPE) is None  # one rank is enough
    fetch = store.fetch(identity(), SHAPE)
    assert not fetch.is_done
    assert store.find(identity(), SHAPE) is None
    assert counts(store, "misses")["memory"] == 0  # nobody asked it
    buffer(store, slot)[:] = features(0)
    if fills:
        store.keep(slot, identity(), SHAPE)
    else:
        store.discard(slot, identity())
    assert store.wait([fetch], LONG_S)
    assert fetch.source == ("ram" if fills else "")
    assert found(store, 0) == (features(0) if fills else None)
    assert store.flush(LONG_S)
    assert list(tier.packages.values()) == ([packed(0)] if fills else [])
    assert put(store, 0) == (not fills)


def test_waiting_wakes_when_all_are_done(opened: Open) -> None:
    store = opened()
    slots = {number: store.reserve(identity(number), SHAPE) for number in range(2)}
    fetches = [store.fetch(identity(number), SHAPE) for number in range(2)]
    assert store.wait([], 0)
    ended = threading.Event()
    threading.Thread(target=lambda: store.wait(fetches, LONG_S) and ended.set(), daemon=True).start()
    for number, slot in slots.items():
        assert slot is not None
        assert not ended.is_set()
        store.discard(slot, identity(number))
    assert ended.wait(LONG_S)


def test_what_came_from_below_is_owed_to_what_lies_above(opened: Open) -> None:
    tiers = [MemoryTier(name) for name in ("near", "middle", "far")]
    store = opened(*tiers)
    save(tiers[1], 0)
    assert fetched(store, 0) == features(0)
    assert store.flush(LONG_S)
    assert [list(tier.packages) for tier in tiers] == [[identity(0).key], [identity(0).key], []]
    assert put(store, 1)  # the control: what a rank gave is owed to all
    assert store.flush(LONG_S)
    assert [identity(1).key in tier.packages for tier in tiers] == [True] * 3


def test_what_is_damaged_near_is_healed_from_far(opened: Open, tmp_path: Path) -> None:
    disk, far = file_tier(tmp_path), MemoryTier("far")
    save(disk, 0)
    save(far, 0)
    path_of(disk, 0).write_bytes(b"")
    store = opened(disk, far)
    assert fetched(store, 0) == features(0)
    assert counts(store, "hits") == {"ram": 1, "disk": 0, "far": 1}
    assert store.flush(LONG_S)
    assert counts(store, "set_aside") == {"ram": 0, "disk": 1, "far": 0}
    assert path_of(disk, 0).read_bytes() == packed(0)


def test_a_miss_is_a_miss_everywhere_and_the_next_one_looks_anew(opened: Open) -> None:
    store = opened(MemoryTier("near"), MemoryTier("far"))
    for number in (1, 2):
        assert fetched(store, 0) is None
        assert counts(store, "misses") == {"ram": number, "near": number, "far": number}
        assert not store._fetches


def test_a_store_that_is_opened_lets_go_of_what_nobody_used(opened: Open, tmp_path: Path) -> None:
    """Nobody asks for anything."""
    disk = file_tier(tmp_path, ttl_s=TTL_S)
    for number in (0, 1):
        save(disk, number)
    age(path_of(disk, 0))
    store = opened(file_tier(tmp_path, ttl_s=TTL_S))
    assert within(LONG_S, lambda: counts(store, "evictions")["disk"] == 1)
    assert [path_of(disk, number).exists() for number in (0, 1)] == [False, True]


def test_a_use_in_ram_is_one_of_the_tiers_now_and_then(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or what is asked for all the time would be gone after a restart."""
    disk = file_tier(tmp_path, ttl_s=TTL_S)
    store = opened(disk)
    assert put(store, 0)
    assert store.flush(LONG_S)
    path = path_of(disk, 0)
    now = time.monotonic()

    def is_used_at(seconds: float) -> bool:
        """Whether a hit in RAM at that time is one of the file, which was used long before."""
        if path.exists():
            age(path)
        monkeypatch.setattr(store_module, "monotonic", lambda: now + seconds)
        assert found(store, 0) == features(0)
        assert store.flush(LONG_S)
        return path.exists() and time.time() - path.stat().st_mtime < TTL_S / 2

    assert [is_used_at(seconds) for seconds in (0, TTL_S / 2 + 1, TTL_S / 2 + 2)] == [False, True, False]
    path.unlink()
    assert is_used_at(2 * TTL_S)  # it is there again


def test_what_a_tier_is_owed_is_handed_over_when_the_image_comes_again(opened: Open) -> None:
    away, there = MemoryTier("away"), MemoryTier("there")
    store = opened(away, there)
    away.open_breakers()
    assert put(store, 0)
    assert put(store, 1)
    assert store.flush(LONG_S)
    assert (len(away.packages), len(there.packages)) == (0, 2)
    away.close_breakers()
    assert store.flush(LONG_S)
    assert not away.packages  # nobody came
    assert found(store, 0) == features(0)
    assert store.flush(LONG_S)
    assert list(away.packages.values()) == [packed(0)]
    assert counts(store, "saved") == {"ram": 2, "away": 1, "there": 2}
    assert found(store, 0) == features(0)  # owed no more
    assert store.flush(LONG_S)
    assert counts(store, "dropped") == {"ram": 0, "away": 2, "there": 0}


def test_a_resting_tier_is_passed(opened: Open) -> None:
    resting, other = MemoryTier("resting"), MemoryTier("other")
    store = opened(resting, other)
    for tier in (resting, other):
        save(tier, 0)
    resting.open_breakers()
    assert fetched(store, 0) == features(0)
    assert counts(store, "hits") == {"ram": 1, "resting": 0, "other": 1}
    assert counts(store, "misses") == {"ram": 0, "resting": 1, "other": 0}


def learn(store: Store, tier: Tier, seconds: float) -> None:
    store.costs.loaded(tier.name, SHAPE.num_bytes, seconds)


def test_a_tier_that_is_slower_than_the_tower_is_not_asked(opened: Open) -> None:
    """And the next one is, if it is faster; the control: without an estimate all are asked."""
    slow, fast = MemoryTier("slow"), MemoryTier("fast")
    store = opened(slow, fast, tower=lambda num_tokens: 1.0)
    for number in range(3):
        save(slow, number)
        save(fast, number)
    assert fetched(store, 0) == features(0)
    assert counts(store, "hits") == {"ram": 1, "slow": 1, "fast": 0}
    for _ in range(50):
        learn(store, slow, 2.0)
    fetch = store.fetch(identity(1), SHAPE)
    assert store.wait([fetch], LONG_S)
    assert (fetch.source, fetch.passed_over, fetch.is_waited_for) == ("fast", ["slow"], True)
    for _ in range(50):
        learn(store, fast, 2.0)
    fetch = store.fetch(identity(2), SHAPE)
    assert (fetch.is_done, fetch.source, fetch.passed_over) == (True, "", ["slow", "fast"])
    assert counts(store, "not_asked") == {"ram": 0, "slow": 2, "fast": 1}
    assert counts(store, "misses") == {"ram": 0, "slow": 0, "fast": 0}


def probing(opened: Open, *below: MemoryTier) -> Store:
    """A store whose first tier is slower than the tower, and is asked next to measure it."""
    now = [0.0]
    store = opened(*below, tower=lambda num_tokens: 1.0, clock=lambda: now[0])
    learn(store, below[0], 1000.0)
    now[0] += cost_model.PROBE_EVERY_S
    return store


def test_a_tier_is_measured_now_and_then_and_nobody_waits(opened: Open) -> None:
    tier = MemoryTier()
    store = probing(opened, tier)
    for number in range(2):
        save(tier, number)
    tier.reading.shut()
    fetch = store.fetch(identity(0), SHAPE)
    assert (fetch.is_waited_for, fetch.passed_over) == (False, ["memory"])
    assert tier.reading.has_come()
    assert store.fetch(identity(1), SHAPE).is_done  # the next one is not asked
    before = store.costs.load_s("memory", SHAPE.num_bytes)
    tier.reading.open()
    assert store.wait([fetch], LONG_S)
    assert fetch.source == "memory"
    after = store.costs.load_s("memory", SHAPE.num_bytes)
    assert before is not None
    assert after is not None
    assert after < before
    assert found(store, 0) == features(0)


def test_a_probe_is_not_kept_from_measuring_by_the_tower(opened: Open) -> None:
    """The request goes on, so the tower gives the same features before the tier does."""
    tier = MemoryTier()
    store = probing(opened, tier)
    save(tier, 0)
    tier.reading.shut()
    fetch = store.fetch(identity(0), SHAPE)
    assert tier.reading.has_come()
    assert not put(store, 0)
    before = store.costs.load_s("memory", SHAPE.num_bytes)
    tier.reading.open()
    assert store.wait([fetch], LONG_S)
    assert store.costs.load_s("memory", SHAPE.num_bytes) != before
    assert found(store, 0) == features(0)


def test_after_a_probe_that_missed_the_next_tier_is_worth_waiting_for(opened: Open) -> None:
    slow, fast = MemoryTier("slow"), MemoryTier("fast")
    store = probing(opened, slow, fast)
    save(fast, 0)
    fast.reading.shut()
    fetch = store.fetch(identity(0), SHAPE)
    assert fast.reading.has_come()
    assert fetch.is_waited_for
    fast.reading.open()
    assert store.wait([fetch], LONG_S)
    assert fetch.source == "fast"


@pytest.mark.parametrize("broken", [OSError, ZeroDivisionError])
def test_a_tier_that_fails_is_passed(opened: Open, broken: type[Exception]) -> None:
    tier, other = MemoryTier("broken"), MemoryTier("other")
    tier.broken = broken
    store = opened(tier, other)
    save(other, 0)
    assert fetched(store, 0) == features(0)
    assert store.flush(LONG_S)
    assert counts(store, "errors")["broken"] > 1  # it could not be filled either


def test_a_load_that_raises_after_all_leaves_nothing_behind(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    """No tier's load may; its slot is free again all the same, and the next tier is asked."""

    class Raises(MemoryTier):
        def load(self, key: bytes, checker: Any, reserve: Any, until: float) -> bool:
            assert reserve() is not None
            raise ZeroDivisionError

    other = MemoryTier("other")
    store = opened(Raises("raises"), other)
    save(other, 0)
    assert fetched(store, 0) == features(0)
    assert within(LONG_S, lambda: "a job of read-raises failed" in caplog.text)
    assert fetched(store, 1) is None
    assert store.ram.counts.snapshot()["held_bytes"] == ALIGN_BYTES


def test_a_fetch_that_can_t_be_begun_leaves_nothing_behind(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image's next one is begun anew, rather than to wait for that one for ever."""

    def fails(*args: object) -> None:
        raise ZeroDivisionError

    tier = MemoryTier()
    store = opened(tier)
    save(tier, 0)
    with monkeypatch.context() as patched:
        patched.setattr(store.costs, "ask", fails)
        with pytest.raises(ZeroDivisionError):
            store.fetch(identity(0), SHAPE)
    assert not store._fetches
    assert fetched(store, 0) == features(0)


def test_what_does_not_arrive_whole_leaves_nothing_behind(opened: Open) -> None:
    tier = MemoryTier()
    store = opened(tier)
    save(tier, 0)
    tier.memory.entries[key_of(identity(0))] = packed(0)[:-1] + b"x"
    assert fetched(store, 0) is None
    assert store.ram.counts.snapshot()["held_bytes"] == 0
    assert counts(store, "set_aside")["memory"] == 1
    save(tier, 0)  # the control
    assert fetched(store, 0) == features(0)


def test_no_room(opened: Open) -> None:
    """What ranks still copy stays; what is wanted beside it is dropped, and counted, until there is room."""
    tier = MemoryTier()
    store = opened(tier, num_bytes=ALIGN_BYTES)
    save(tier, 0)
    slot = store.reserve(identity(1), SHAPE)
    assert slot is not None
    assert fetched(store, 0) is None
    assert not put(store, 2)
    assert counts(store, "dropped") == {"ram": 2, "memory": 1}
    store.discard(slot, identity(1))
    assert fetched(store, 0) == features(0)
    assert store.reserve(identity(3), Shape(1 << 20, 64, "bfloat16")) is None  # more than there is at all


def test_a_queue_that_is_full(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, other = MemoryTier("full"), MemoryTier("other")
    store = opened(tier, other)
    for number in range(6):
        save(other, number)
    tier.reading.shut()
    monkeypatch.setattr(store._readers["full"], "_most_waiting", 1)
    for number in range(num_readers(store, tier)):
        store.fetch(identity(number), SHAPE)
        assert tier.reading.has_come()
    waiting = store.fetch(identity(4), SHAPE)
    assert fetched(store, 5) == features(5)  # from the other one
    assert not waiting.is_done
    assert counts(store, "misses") == {"ram": 0, "full": 1, "other": 0}
    tier.reading.open()
    assert store.wait([waiting], LONG_S)


def test_a_reader_that_takes_what_is_then_refused(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """It came for another one, for which the next tier is asked in its place."""
    near, far = MemoryTier("near"), MemoryTier("far")
    store = opened(near, far)
    for number in range(2):
        save(near, number)
        save(far, number)
    jobs: list[Callable[[], None]] = []

    def submit(job: Callable[[], None]) -> bool:
        """Take the first job; do it before the second one is refused."""
        if not jobs:
            jobs.append(job)
            return True
        jobs[0]()
        return False

    monkeypatch.setattr(store._readers["near"], "submit", submit)
    other, urgent = store.fetch(identity(0), SHAPE), store.fetch(identity(1), SHAPE, is_urgent=True)
    assert store.wait([urgent, other], LONG_S)
    assert (urgent.source, other.source) == ("near", "far")
    assert counts(store, "hits") == {"ram": 0, "near": 1, "far": 1}
    assert counts(store, "misses") == {"ram": 0, "near": 1, "far": 0}


def test_a_fetch_that_hangs_is_waited_for_no_longer(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes later goes on at once, and what its tower gives is used by those who come after."""
    tier = MemoryTier()
    store = opened(tier)
    tier.reading.shut()
    fetch = store.fetch(identity(0), SHAPE)
    assert tier.reading.has_come()
    assert store.fetch(identity(0), SHAPE).is_waited_for
    monkeypatch.setattr("vllm_mmcache.components.features.engine.store.LONGEST_LOAD_S", 0.0)
    assert store.fetch(identity(0), SHAPE) is fetch
    assert not fetch.is_waited_for
    assert put(store, 0)
    assert fetch.is_done
    assert store.fetch(identity(0), SHAPE).source == "ram"
    tier.reading.open()


@pytest.mark.parametrize("hangs", [True, False])
def test_a_fetch_that_waits_for_its_turn(opened: Open, hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for longer than a load may take, unless it is behind one that hangs."""
    tier = MemoryTier()
    store = opened(tier)
    tier.reading.shut()
    for number in range(num_readers(store, tier)):
        store.fetch(identity(number), SHAPE)
        assert tier.reading.has_come()
    fetch = store.fetch(identity(9), SHAPE)
    monkeypatch.setattr("vllm_mmcache.components.features.engine.store.LONGEST_LOAD_S", 0.0)
    if hangs:
        monkeypatch.setattr("vllm_mmcache.storage.tier.HUNG_S", -LONG_S)
    assert fetch.is_waited_for != hangs
    assert put(store, 9)  # the tower gives it meanwhile
    assert fetch.is_done
    tier.reading.open()


def test_what_comes_late_ends_no_other_fetch(opened: Open) -> None:
    """A load that hung while a rank filled the same image, which then went."""
    tier = MemoryTier()
    store = opened(tier, keeps=False)
    tier.reading.shut()
    late = store.fetch(identity(0), SHAPE)
    assert tier.reading.has_come()
    assert put(store, 0)
    assert late.source == "ram"
    assert store.flush(LONG_S)
    assert found(store, 0) == features(0)  # and is kept no longer
    del tier.packages[identity(0).key]
    slot = store.reserve(identity(0), SHAPE)
    assert slot is not None
    fetch = store.fetch(identity(0), SHAPE)
    tier.reading.open()
    assert within(LONG_S, lambda: counts(store, "misses")["memory"] == 1)
    assert not fetch.is_done
    store.discard(slot, identity(0))
    assert fetch.is_done


def test_a_load_whose_turn_comes_too_late_is_not_begun(opened: Open) -> None:
    tier = MemoryTier()
    store = opened(tier)
    for number in range(6):
        save(tier, number)
    tier.reading.shut()
    fetches = [store.fetch(identity(number), SHAPE) for number in range(6)]
    for _ in range(num_readers(store, tier)):
        assert tier.reading.has_come()
    assert put(store, 4)  # it was waiting
    tier.reading.open()
    assert store.wait(fetches, LONG_S)
    assert [fetch.source for fetch in fetches] == ["memory"] * 4 + ["ram", "memory"]
    assert counts(store, "hits")["memory"] == 5


def test_closing_with_a_tier_that_hangs(opened: Open) -> None:
    """What waits for the other one is written first."""
    hung, other = MemoryTier("hung"), MemoryTier("other")
    store = opened(hung, other)
    hung.writing.shut()
    for number in range(3):
        assert put(store, number)
    assert not store.flush(0.01)
    assert store._writers["other"].flush(LONG_S)
    assert not store.close(0.1)
    assert len(other.packages) == 3
    assert put(store, 9)  # RAM goes on
    assert found(store, 9) == features(9)
    assert counts(store, "dropped") == {"ram": 0, "hung": 2 + 2, "other": 2}  # but the one that hangs
    hung.writing.open()
    assert store.close(0)
    assert store.fetch(identity(10), SHAPE).is_done


def test_closing_lets_go_of_connections(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each tier, once what waits for it is written."""
    tiers = MemoryTier("near"), MemoryTier("far")
    written: dict[str, int] = {}
    for tier in tiers:
        monkeypatch.setattr(tier.memory, "close", lambda tier=tier: written.update({tier.name: len(tier.packages)}))
    store = opened(*tiers)
    assert put(store, 0)
    assert not written
    assert store.close(LONG_S)
    assert written == {"near": 1, "far": 1}


@pytest.mark.parametrize("keeps", [True, False])
def test_memory_for_transit_alone(opened: Open, keeps: bool) -> None:
    """Without RAM to keep features in they go once they are written and were used; else they stay."""
    tier = MemoryTier()
    store = opened(tier, keeps=keeps)
    tier.writing.shut()
    assert put(store, 0)
    assert found(store, 0) == features(0)  # still owed to the tier
    assert found(store, 0) == features(0)
    tier.writing.open()
    assert store.flush(LONG_S)
    assert found(store, 0) == (features(0) if keeps else None)
    assert fetched(store, 0) == features(0)
    assert counts(store, "hits")["memory"] == (not keeps)


def test_threads(opened: Open, tmp_path: Path) -> None:
    """Several threads fetch, fill and use the same few images in too little room."""
    store = opened(file_tier(tmp_path), num_bytes=5 * ALIGN_BYTES)
    wrong: list[int] = []

    def work(start: int) -> None:
        for step in range(scaled(200)):
            number = (start + step * 7) % 30
            store.wait([store.fetch(identity(number), SHAPE)], 0.01)
            seen = found(store, number)
            if seen is None:
                put(store, number)
            elif seen != features(number):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.flush(LONG_S)
    assert not wrong
    store.ram.clear()  # what is on disk comes from there now, also where the threads had no time for it
    assert all(fetched(store, number) in (None, features(number)) for number in range(30))
    assert min(counts(store, "hits").values()) > 0
    assert set(counts(store, "errors").values()) | set(counts(store, "set_aside").values()) == {0}


NUMBERS = st.integers(0, 9)
WHICH = st.integers(0, 99)  # of what there is: that depends on threads, and what is drawn must not


class Uses(RuleBasedStateMachine):
    """Random uses of a store with a real directory: what is found has exactly the bytes of its identity.

    And what is held never changes, room is never lost, and what is on disk is whole.
    """

    writes = staticmethod(features)

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.arena = Arena.create(6 * ALIGN_BYTES, 1)
        self.held: list[tuple[int, Slot]] = []
        self.filling: dict[int, Slot] = {}
        self.open()

    def open(self) -> None:
        self.tier = file_tier(self._folder.name, 1 << 20)
        self.store = Store(
            self.arena, RamTier(self.arena.num_bytes), [self.tier], CostModel(lambda num_tokens: 0.01, None)
        )

    @rule(number=NUMBERS, waits=st.booleans())
    def fetch(self, number: int, waits: bool) -> None:
        fetch = self.store.fetch(identity(number), SHAPE)
        if waits and number not in self.filling:
            assert self.store.wait([fetch], LONG_S)

    @rule(number=NUMBERS)
    def reserve(self, number: int) -> None:
        if (slot := self.store.reserve(identity(number), SHAPE)) is not None:
            assert number not in self.filling
            self.filling[number] = slot

    @rule(which=WHICH, keeps=st.booleans(), part=st.floats(0, 1))
    def fill(self, which: int, keeps: bool, part: float) -> None:
        if not self.filling:
            return
        number = sorted(self.filling)[which % len(self.filling)]
        slot = self.filling.pop(number)
        if keeps:
            buffer(self.store, slot)[:] = self.writes(number)
            self.store.keep(slot, identity(number), SHAPE)
        else:  # a rank that died in between
            some = int(part * SHAPE.num_bytes)
            buffer(self.store, slot)[:some] = features(number)[:some]
            self.store.discard(slot, identity(number))

    @rule(number=NUMBERS)
    def find(self, number: int) -> None:
        slot = self.store.find(identity(number), SHAPE)
        if slot is not None:
            assert number not in self.filling
            self.held.append((number, slot))
            self.look()

    @rule(which=WHICH)
    def release(self, which: int) -> None:
        if not self.held:
            return
        self.look()
        _, slot = self.held.pop(which % len(self.held))
        self.store.release(slot)

    @rule()
    def restart(self) -> None:
        """As a new engine does it."""
        self.end()
        self.open()

    def look(self) -> None:
        for number, slot in self.held:
            assert buffer(self.store, slot) == features(number), number

    def end(self) -> None:
        self.look()
        for _, slot in self.held:
            self.store.release(slot)
        for number, slot in self.filling.items():
            self.store.discard(slot, identity(number))
        self.held, self.filling = [], {}
        assert self.store.wait(list(self.store._fetches.values()), LONG_S)
        assert self.store.close(LONG_S)
        # A load whose place a rank had taken is waited for by nobody else, and writes into the same arena.
        assert within(LONG_S, lambda: not any(readers._until for readers in self.store._readers.values()))
        self.store.ram.clear()
        assert self.store.ram.counts.snapshot()["held_bytes"] == 0

    def teardown(self) -> None:
        try:
            self.end()
            for number in range(10):
                assert load(self.tier, number) in (None, features(number)), number
            every = self.tier.counts.snapshot()
            assert every["set_aside"] == every["errors"] == 0
        finally:
            self.arena.close()
            self._folder.cleanup()


TestUses = pytest.mark.slow(Uses.TestCase)
TestUses.settings = hypothesis(max_examples=scaled(40), stateful_step_count=40, deadline=None)


def test_the_property_can_fail() -> None:
    """The control: features under another image's identity are seen."""

    class Hooks(Uses):
        writes = staticmethod(lambda number=0, shape=SHAPE: features(number ^ 1, shape))

    machine = Hooks()
    machine.reserve(0)
    machine.filling, filling = {}, machine.filling
    buffer(machine.store, filling[0])[:] = machine.writes(0)
    machine.store.keep(filling[0], identity(0), SHAPE)
    with pytest.raises(AssertionError):
        machine.find(0)
    machine.store.release(machine.held.pop()[1])
    with pytest.raises(AssertionError):
        machine.teardown()
