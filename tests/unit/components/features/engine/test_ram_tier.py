# SPDX-License-Identifier: Apache-2.0
"""The RAM tier gives out places: no two overlap, what is held stays, and what was used longest ago goes first."""

import random
import sys
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.sizes import scaled
from vllm_mmcache.components.features.engine.ram_tier import ALIGN_BYTES, RamTier, Slot

PAGE = ALIGN_BYTES


def keep(tier: RamTier, key: str, num_bytes: int = PAGE) -> Slot:
    """Reserve, publish and release."""
    slot = tier.reserve(key, num_bytes)
    assert slot is not None, key
    tier.publish(slot)
    tier.release(slot)
    return slot


def use(tier: RamTier, key: str) -> Slot:
    slot = tier.find(key)
    assert slot is not None, key
    tier.release(slot)
    return slot


def held(tier: RamTier) -> float:
    return tier.counts.snapshot()["held_bytes"]


def test_the_one_used_longest_ago_goes_first() -> None:
    tier = RamTier(3 * PAGE)
    for key in "abc":
        keep(tier, key)
    first = use(tier, "a")
    keep(tier, "d")
    assert [tier.has(key) for key in "abcd"] == [True, False, True, True]
    assert use(tier, "a") is first
    assert tier.find("b") is None
    counts = tier.counts.snapshot()
    assert (counts["hits"], counts["misses"], counts["read_bytes"]) == (2, 1, 2 * PAGE)
    assert (counts["saved"], counts["saved_bytes"], counts["evictions"]) == (4, 4 * PAGE, 1)
    assert (counts["held_bytes"], counts["dropped"]) == (3 * PAGE, 0)


def test_what_is_held_stays() -> None:
    tier = RamTier(2 * PAGE)
    keep(tier, "a")
    keep(tier, "b")
    slot = tier.find("a")
    assert slot is not None
    keep(tier, "c")
    assert [tier.has(key) for key in "abc"] == [True, False, True]
    tier.hold(slot)
    tier.release(slot)
    assert tier.reserve("d", 2 * PAGE) is None  # still held once
    assert tier.has("c")  # and nothing went for what could not be
    assert tier.counts.snapshot()["dropped"] == 1
    tier.release(slot)
    assert tier.reserve("d", 2 * PAGE) is not None
    assert not tier.has("a")


def test_only_published_slots_are_found() -> None:
    tier = RamTier(4 * PAGE)
    slot = tier.reserve("a", 5)
    assert slot is not None
    assert (slot.num_bytes, held(tier)) == (5, PAGE)
    assert not tier.has("a")
    assert tier.find("a") is None
    assert tier.reserve("a", 5) is None  # being filled
    tier.discard(slot)
    assert held(tier) == 0
    again = keep(tier, "a")
    assert tier.has("a")
    assert tier.reserve("a", 5) is None  # published
    assert tier.counts.snapshot()["dropped"] == 0
    assert use(tier, "a") is again


def test_a_slot_that_nobody_holds_is_given_back_once() -> None:
    tier = RamTier(2 * PAGE)
    slot = tier.reserve("a", PAGE)
    assert slot is not None
    tier.discard(slot)
    for misuse in (tier.discard, tier.release, tier.hold):
        with pytest.raises(ValueError, match="nobody holds"):
            misuse(slot)
    tier.publish(slot)
    assert not tier.has("a")
    assert held(tier) == 0
    with pytest.raises(ValueError, match="a slot of 0 bytes"):
        tier.reserve("a", 0)


def test_only_neighbours_make_room() -> None:
    """What lies beside something held is no help, so it stays."""
    tier = RamTier(6 * PAGE)
    for key in "abcdef":
        keep(tier, key)
    wall = tier.find("c")
    assert wall is not None
    keep(tier, "big", 3 * PAGE)  # b and a are older, and lie on the wrong side
    assert [tier.has(key) for key in "abcdef"] == [True, True, True, False, False, False]
    assert tier.counts.snapshot()["evictions"] == 3
    assert tier.reserve("bigger", 4 * PAGE) is None
    assert tier.has("big")
    tier.release(wall)
    assert tier.reserve("bigger", 4 * PAGE) is not None


def test_only_what_is_in_the_way_goes() -> None:
    tier = RamTier(6 * PAGE)
    for key in "abcdef":
        keep(tier, key)
    for key in "bef":
        use(tier, key)
    keep(tier, "big", 3 * PAGE)  # d is older than b, but without b there was no room
    assert [tier.has(key) for key in "abcdef"] == [False, False, False, True, True, True]


def test_room_for_transit_alone() -> None:
    tier = RamTier(2 * PAGE, keeps=False)
    slot = tier.reserve("a", PAGE)
    assert slot is not None
    tier.publish(slot)
    assert tier.find("a") is slot  # for as long as someone holds it
    tier.release(slot)
    assert tier.has("a")
    tier.release(slot)
    assert not tier.has("a")
    assert held(tier) == 0


def test_too_large_or_no_memory() -> None:
    tier = RamTier(2 * PAGE)
    keep(tier, "a", 2 * PAGE)
    assert tier.reserve("b", 2 * PAGE + 1) is None
    assert tier.has("a")
    for num_bytes in (0, PAGE - 1):
        none = RamTier(num_bytes)
        assert none.reserve("a", 1) is None
        assert none.counts.snapshot()["dropped"] == 1


def test_clear() -> None:
    tier = RamTier(4 * PAGE)
    keep(tier, "free")
    read, filled = keep(tier, "read"), tier.reserve("filled", PAGE)
    assert tier.find("read") is read
    assert filled is not None
    tier.clear()
    tier.publish(filled)  # too late
    assert not any(tier.has(key) for key in ("free", "read", "filled"))
    assert held(tier) == 2 * PAGE
    new = tier.reserve("read", PAGE)  # beside the old one
    assert new is not None
    tier.publish(new)
    tier.release(read)
    tier.discard(filled)
    tier.release(new)
    assert held(tier) == PAGE
    assert use(tier, "read") is new


class Places(RuleBasedStateMachine):
    """Random use against a model: who holds what, what is published, in which order it was used."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = RamTier(16 * PAGE + 100)
        self.holds: list[Slot] = []
        """One entry for each hold."""
        self.published: dict[str, Slot] = {}
        """The one used last is last."""
        self.filling: dict[str, Slot] = {}
        self.counts = dict.fromkeys(("hits", "misses", "saved", "saved_bytes", "read_bytes", "dropped", "evictions"), 0)

    def live(self) -> set[Slot]:
        return {*self.holds, *self.published.values()}

    @staticmethod
    def pages(slot: Slot) -> range:
        return range(slot.offset // PAGE, -(-(slot.offset + slot.num_bytes) // PAGE))

    def longest_run(self) -> int:
        """Pages side by side that are free, or would be if all that nobody holds went."""
        taken = {page for slot in self.holds for page in self.pages(slot)}
        line = "".join("x" if page in taken else "." for page in range(16))
        return max(map(len, line.split("x")))

    @rule(key=st.sampled_from("abcdefghijkl"), num_bytes=st.integers(1, 2 * PAGE) | st.integers(1, 9 * PAGE))
    def reserve(self, key: str, num_bytes: int) -> None:
        need = -(-num_bytes // PAGE)
        before, fits = self.live(), self.longest_run() >= need
        free = 16 - sum(len(self.pages(slot)) for slot in before)
        slot = self.tier.reserve(key, num_bytes)
        gone = [slot for slot in self.published.values() if not self.tier.has(slot.key)]
        assert not set(gone) & set(self.holds)
        if key in self.published or key in self.filling:
            assert slot is None
            assert not gone
            return
        assert (slot is not None) == fits
        if slot is None:
            assert not gone
            self.counts["dropped"] += 1
            return
        assert slot.num_bytes == num_bytes
        assert slot.offset % PAGE == 0
        place = set(self.pages(slot))
        assert all(place & set(self.pages(one)) for one in gone)  # each was in the way
        if gone:
            # Had it been possible without what was used last of these, that one would still be there.
            kept = list(self.published.values())
            last = max(kept.index(one) for one in gone)
            older = {page for one in kept[:last] if one not in self.holds for page in self.pages(one)}
            taken = {page for one in before for page in self.pages(one)} - older
            line = "".join("x" if page in taken else "." for page in range(16))
            assert max(map(len, line.split("x"))) < need
        else:
            assert free >= need
        for one in gone:
            del self.published[one.key]
        self.counts["evictions"] += len(gone)
        self.filling[key] = slot
        self.holds.append(slot)

    @rule(key=st.sampled_from("abcdefghijkl"))
    def find(self, key: str) -> None:
        slot = self.tier.find(key)
        assert slot is self.published.get(key)
        self.counts["hits" if slot else "misses"] += 1
        if slot:
            self.counts["read_bytes"] += slot.num_bytes
            self.published[key] = self.published.pop(key)
            self.holds.append(slot)

    def some(self, data: st.DataObject, slots: list[Slot]) -> Slot:
        return slots[data.draw(st.integers(0, len(slots) - 1))]

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), good=st.booleans())
    def finish(self, data: st.DataObject, good: bool) -> None:
        slot = self.some(data, list(self.filling.values()))
        del self.filling[slot.key]
        if good:
            self.tier.publish(slot)
            self.published[slot.key] = slot
            self.counts["saved"] += 1
            self.counts["saved_bytes"] += slot.num_bytes
        else:
            self.tier.discard(slot)
            self.holds.remove(slot)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        slot = self.some(data, self.holds)
        self.tier.hold(slot)
        self.holds.append(slot)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = self.some(data, self.holds)
        self.tier.release(slot)
        self.holds.remove(slot)
        if slot not in self.holds and self.filling.get(slot.key) is slot:
            del self.filling[slot.key]

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.published.clear()
        self.filling.clear()

    @invariant()
    def no_two_overlap(self) -> None:
        pages = [page for slot in self.live() for page in self.pages(slot)]
        assert len(pages) == len(set(pages))
        assert all(0 <= page < 16 for page in pages)

    @invariant()
    def accounts_are_exact(self) -> None:
        counts = self.tier.counts.snapshot()
        assert {name: counts[name] for name in self.counts} == self.counts
        assert counts["held_bytes"] == PAGE * sum(len(self.pages(slot)) for slot in self.live())
        assert all(self.tier.has(key) for key in self.published)

    def teardown(self) -> None:
        """Everything is free at the end, in one piece."""
        for slot in self.holds:
            self.tier.release(slot)
        self.tier.clear()
        assert held(self.tier) == 0
        assert self.tier.reserve("all", 16 * PAGE) is not None


TestPlaces = pytest.mark.slow(Places.TestCase)
TestPlaces.settings = settings(max_examples=scaled(60), stateful_step_count=60, deadline=None)


def fill(memory: bytearray, slot: Slot) -> None:
    memory[slot.offset : slot.offset + slot.num_bytes] = bytes([int(slot.key)]) * slot.num_bytes


def is_right(memory: bytearray, slot: Slot) -> bool:
    return memory[slot.offset : slot.offset + slot.num_bytes] == bytes([int(slot.key)]) * slot.num_bytes


def test_threads() -> None:
    """Bytes that one thread wrote are not touched by another while it holds them."""
    memory = bytearray(40 * PAGE)
    tier = RamTier(len(memory))
    wrong: list[str] = []
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def work(seed: int) -> None:
        drawn = random.Random(seed)
        for _ in range(1500):
            number = drawn.randrange(1, 20)
            slot = tier.find(f"{number}") or tier.reserve(f"{number}", number * PAGE // 2)
            if slot is None:
                continue
            if not slot.is_published:
                fill(memory, slot)
                tier.publish(slot)
            if not is_right(memory, slot):
                wrong.append(slot.key)
            tier.release(slot)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval_s)
    assert not wrong
    counts = tier.counts.snapshot()
    assert min(counts["hits"], counts["evictions"]) > 100
    tier.clear()
    assert held(tier) == 0
    assert tier.reserve("all", len(memory)) is not None


def test_what_is_released_too_early_is_overwritten() -> None:
    """The control of the test above: what it looks for is seen."""
    memory = bytearray(PAGE)
    tier = RamTier(PAGE)
    mine = keep(tier, "1")
    fill(memory, mine)
    assert is_right(memory, mine)
    fill(memory, keep(tier, "2"))
    assert not is_right(memory, mine)
