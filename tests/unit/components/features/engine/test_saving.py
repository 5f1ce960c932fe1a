# SPDX-License-Identifier: Apache-2.0
"""What is written from RAM to the tiers below, what becomes of it there, and what a tier is owed."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.packages import SHAPE, features, identity, packed
from tests.support.tiers import LONG_S, MemoryTier, fill
from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.engine import store as store_module
from vllm_mmcache.components.features.engine.cost_model import CostModel
from vllm_mmcache.components.features.engine.ram_tier import ALIGN_BYTES, RamTier, Slot
from vllm_mmcache.components.features.engine.store import Store

SLOTS = 8
Open = Callable[..., Store]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens stores with room for SLOTS images over tiers in memory."""
    made: list[tuple[Store, Arena]] = []

    def open_store(*below: MemoryTier) -> Store:
        arena = Arena.create(SLOTS * ALIGN_BYTES, 1)
        costs = CostModel(lambda num_tokens: None, None, [tier.counts for tier in below])
        made.append((Store(arena, RamTier(arena.num_bytes), below, costs), arena))
        return made[-1][0]

    yield open_store
    for store, arena in made:
        for tier in store.below:
            assert isinstance(tier, MemoryTier)
            tier.writing.open()
        store.close(LONG_S)
        arena.close()


def put(store: Store, number: int) -> Slot:
    """As a rank does it; nobody holds it then."""
    slot = store.reserve(identity(number), SHAPE)
    assert slot is not None
    store._arena.buffer(slot.offset, SHAPE.num_bytes)[:] = features(number)
    store.keep(slot, identity(number), SHAPE)
    return slot


def count(tier: MemoryTier, name: str) -> float:
    return tier.counts.snapshot()[name]


def test_in_the_order_of_arrival(opened: Open) -> None:
    """Each once, also if it is used while it waits or is written."""
    tier = MemoryTier()
    store = opened(tier)
    order = [3, 0, 5, 1, 4]
    tier.writing.shut()
    for number in order:
        put(store, number)
        slot = store.find(identity(number), SHAPE)
        assert slot is not None
        store.release(slot)
    tier.writing.open()
    assert store.flush(LONG_S)
    assert list(tier.packages.values()) == [packed(number) for number in order]
    assert (count(tier, "saved"), count(tier, "dropped")) == (len(order), 0)


def test_a_tier_that_hangs_is_owed_what_the_other_has(opened: Open) -> None:
    hung, other = MemoryTier("hung"), MemoryTier("other")
    store = opened(hung, other)
    hung.writing.shut()
    slots = [put(store, number) for number in range(4)]
    assert store._writers["other"].flush(LONG_S)
    assert (len(other.packages), len(hung.packages)) == (4, 0)
    assert [slot.pending_tiers for slot in slots] == [{"hung"}] * 4
    hung.writing.open()
    assert store.flush(LONG_S)
    assert hung.packages == other.packages
    assert [slot.pending_tiers for slot in slots] == [set()] * 4


def test_what_is_let_go_before_its_turn_is_dropped(opened: Open) -> None:
    """And the one that is being written is held: it stays where it is, whole, which is no use of it."""
    tier = MemoryTier()
    store = opened(tier)
    tier.writing.shut()
    slot = put(store, 0)
    assert tier.writing.has_come()
    assert slot.num_holders == 1
    for number in range(1, SLOTS):
        put(store, number)
    assert count(tier, "dropped") == 0
    for number in range(SLOTS, 2 * SLOTS - 1):  # all that is not held goes for these
        store.ram.release(fill(store.ram, store._arena, identity(number), SHAPE, b"\xff" * SHAPE.num_bytes))
    assert [store.ram.has(identity(number).key) for number in (0, 1)] == [True, False]
    tier.writing.open()
    assert store.flush(LONG_S)
    assert list(tier.packages.values()) == [packed(0)]
    assert count(tier, "dropped") == SLOTS - 1
    assert slot.num_holders == 0
    assert store.ram.counts.snapshot()["hits"] == 0


@pytest.mark.parametrize("broken", [None, OSError, ZeroDivisionError])
def test_a_tier_is_owed_what_it_did_not_take(opened: Open, broken: type[Exception] | None) -> None:
    """Since it is left alone, fails as it may, or has a bug: it is handed over when the image comes again."""
    tier = MemoryTier()
    store = opened(tier)
    tier.broken = broken
    if broken is None:
        tier.open_breakers()
    slot = put(store, 0)
    assert store.flush(LONG_S)
    assert slot.pending_tiers == {tier.name}
    assert slot.num_holders == 0
    assert (tier.packages, count(tier, "dropped"), count(tier, "errors")) == ({}, 1, broken is not None)
    if broken is not ZeroDivisionError:
        for _ in range(3):  # while the tier is left alone
            assert store.find(identity(0), SHAPE) is slot
            store.release(slot)
        assert store.flush(LONG_S)
        assert count(tier, "dropped") == 1, "it is one package"
    tier.broken = None
    tier.close_breakers()
    assert store.find(identity(0), SHAPE) is slot
    assert store.flush(LONG_S)
    assert slot.pending_tiers == set()
    assert list(tier.packages.values()) == [packed(0)]


def test_a_tier_is_not_owed_what_is_too_large_for_it(opened: Open) -> None:
    for max_bytes in (SHAPE.num_bytes - 1, SHAPE.num_bytes):
        tier = MemoryTier(max_bytes=max_bytes)
        store = opened(tier)
        slot = put(store, 0)
        assert store.flush(LONG_S)
        assert not slot.pending_tiers
        assert len(tier.packages) == (max_bytes == SHAPE.num_bytes)


def test_no_more_wait_than_may(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MOST_WAITING", 3)
    tier = MemoryTier()
    store = opened(tier)
    tier.writing.shut()
    first = put(store, 0)
    assert tier.writing.has_come()
    slots = [first, *(put(store, number) for number in range(1, 6))]
    assert count(tier, "dropped") == 2
    tier.writing.open()
    assert store.flush(LONG_S)
    assert [bool(slot.pending_tiers) for slot in slots] == [False] * 4 + [True] * 2
