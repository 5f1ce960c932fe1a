# SPDX-License-Identifier: Apache-2.0
"""What is written from RAM, in which order, and what becomes of it when a tier is slow, away, or hangs."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from vllm_mmcache.components.features.writer import Writer

from tests.support.packages import SHAPE, features, identity, packed
from tests.support.tiers import LONG_S, MemoryTier, fill
from vllm_mmcache.components.features import writer as module
from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.engine.ram_tier import ALIGN_BYTES, RamTier, Slot
from vllm_mmcache.components.features.package import unpack

SLOTS = 8


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(SLOTS * ALIGN_BYTES, 1)
    yield made
    made.close()


@pytest.fixture
def ram(arena: Arena) -> RamTier:
    return RamTier(arena.num_bytes)


@pytest.fixture
def tier() -> Iterator[MemoryTier]:
    made = MemoryTier()
    yield made
    made.writing.open()


@pytest.fixture
def writer(tier: MemoryTier, ram: RamTier, arena: Arena) -> Iterator[Writer]:
    made = Writer(tier, ram, arena.buffer)
    yield made
    tier.writing.open()
    made.close(LONG_S)


def put(ram: RamTier, arena: Arena, number: int, *owed: Writer) -> Slot:
    """Fill a slot and hand it to writers; nobody holds it."""
    slot = fill(ram, arena, identity(number), SHAPE, features(number))
    slot.pending_tiers.update(one.tier.name for one in owed)
    for one in owed:
        one.hand(identity(number), SHAPE)
    ram.release(slot)
    return slot


def count(tier: MemoryTier, name: str) -> float:
    return tier.counters.snapshot()[name]


def test_in_the_order_of_arrival(writer: Writer, tier: MemoryTier, ram: RamTier, arena: Arena) -> None:
    order = [3, 0, 5, 1, 4]
    tier.writing.shut()
    for number in order:
        put(ram, arena, number, writer)
        writer.hand(identity(number), SHAPE)  # it is waiting, or being written
    assert not writer.flush(0)
    tier.writing.open()
    assert writer.flush(LONG_S)
    assert list(tier.packages.values()) == [packed(number) for number in order]
    assert count(tier, "saved") == len(order)
    assert count(tier, "dropped") == 0


def test_a_tier_that_hangs_keeps_no_other_from_writing(ram: RamTier, arena: Arena) -> None:
    """The control: the one that hangs has nothing until it goes on."""
    hung, other = MemoryTier("hung"), MemoryTier("other")
    writers = [Writer(one, ram, arena.buffer) for one in (hung, other)]
    hung.writing.shut()
    slots = [put(ram, arena, number, *writers) for number in range(4)]
    assert writers[1].flush(LONG_S)
    assert len(other.packages) == 4
    assert not hung.packages
    assert [slot.pending_tiers for slot in slots] == [{"hung"}] * 4
    hung.writing.open()
    assert writers[0].flush(LONG_S)
    assert hung.packages == other.packages
    assert [slot.pending_tiers for slot in slots] == [set()] * 4
    assert [writer.close(LONG_S) for writer in writers] == [True, True]


def test_what_is_let_go_before_its_turn_is_dropped(
    writer: Writer, tier: MemoryTier, ram: RamTier, arena: Arena
) -> None:
    """And the one that is being written stays where it is, whole."""
    tier.writing.shut()
    for number in range(SLOTS):
        put(ram, arena, number, writer)
    assert tier.writing.has_come()
    assert count(tier, "dropped") == 0
    for number in range(SLOTS, 2 * SLOTS - 1):  # all that is not held goes for these
        ram.release(fill(ram, arena, identity(number), SHAPE, b"\xff" * SHAPE.num_bytes))
    assert ram.has(identity(0).key)
    assert not ram.has(identity(1).key)
    tier.writing.open()
    assert writer.flush(LONG_S)
    assert list(tier.packages.values()) == [packed(0)]
    assert count(tier, "dropped") == SLOTS - 1


def test_what_is_being_written_is_held(writer: Writer, tier: MemoryTier, ram: RamTier, arena: Arena) -> None:
    tier.writing.shut()
    slot = put(ram, arena, 0, writer)
    assert tier.writing.has_come()
    assert slot.num_holders == 1
    tier.writing.open()
    assert writer.flush(LONG_S)
    assert slot.num_holders == 0
    assert ram.counters.snapshot()["hits"] == 0  # no use of it


def test_a_resting_tier_is_owed(writer: Writer, tier: MemoryTier, ram: RamTier, arena: Arena) -> None:
    tier.rest()
    slot = put(ram, arena, 0, writer)
    assert writer.flush(LONG_S)
    assert slot.pending_tiers == {tier.name}
    assert not tier.packages
    assert count(tier, "dropped") == 1
    tier.wake()
    writer.hand(identity(0), SHAPE)
    assert writer.flush(LONG_S)
    assert slot.pending_tiers == set()
    assert list(tier.packages.values()) == [packed(0)]


def test_a_tier_is_not_owed_what_is_too_large_for_it(ram: RamTier, arena: Arena) -> None:
    for max_bytes in (SHAPE.num_bytes - 1, SHAPE.num_bytes):
        tier = MemoryTier(max_bytes=max_bytes)
        writer = Writer(tier, ram, arena.buffer)
        slot = put(ram, arena, max_bytes, writer)
        assert writer.close(LONG_S)
        assert not slot.pending_tiers
        assert len(tier.packages) == (max_bytes == SHAPE.num_bytes)


@pytest.mark.parametrize("broken", [OSError, ZeroDivisionError])
def test_nothing_that_a_tier_raises_ends_the_thread(
    writer: Writer,
    tier: MemoryTier,
    ram: RamTier,
    arena: Arena,
    broken: type[Exception],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the tier says that it can fail with, and a bug of ours."""
    tier.broken = broken
    slot = put(ram, arena, 0, writer)
    assert writer.flush(LONG_S)
    tier.broken = None
    tier.wake()
    put(ram, arena, 1, writer)
    assert writer.flush(LONG_S)
    assert list(tier.packages.values()) == [packed(1)]
    assert count(tier, "errors") == 1
    assert slot.pending_tiers == {tier.name}
    assert slot.num_holders == 0
    assert len([record for record in caplog.records if record.name == "vllm.mmcache"]) == 1


def test_no_more_wait_than_may(
    writer: Writer, tier: MemoryTier, ram: RamTier, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    tier.writing.shut()
    slots = [put(ram, arena, number, writer) for number in range(5)]
    assert count(tier, "dropped") == 2
    tier.writing.open()
    assert writer.flush(LONG_S)
    assert [bool(slot.pending_tiers) for slot in slots] == [False] * 3 + [True] * 2


def test_closed_it_takes_no_more(writer: Writer, tier: MemoryTier, ram: RamTier, arena: Arena) -> None:
    put(ram, arena, 0, writer)
    assert writer.close(LONG_S)
    put(ram, arena, 1, writer)
    assert writer.flush(0)
    assert list(tier.packages.values()) == [packed(0)]
    assert count(tier, "dropped") == 1
    assert writer._thread is not None
    assert not writer._thread.is_alive()


def test_closing_does_not_wait_for_one_that_hangs(
    writer: Writer, tier: MemoryTier, ram: RamTier, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it waits for the tier leaves nothing of its time to wait for the thread; the control: it joins it."""
    joined: list[float | None] = []
    tier.writing.shut()
    put(ram, arena, 0, writer)
    assert tier.writing.has_come()
    with monkeypatch.context() as patched:
        patched.setattr(writer._thread, "join", joined.append)
        assert not writer.close(0.05)
    assert joined == [0]


EXIT = """
import sys, time
from tests.support.packages import SHAPE, features, identity
from tests.support.tiers import MemoryTier, fill
from vllm_mmcache.components.features import writer
from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.engine.ram_tier import RamTier

class Tier(MemoryTier):
    def _write(self, name, parts, num_bytes):
        time.sleep(float(sys.argv[1]))
        print(name, flush=True)

writer.EXIT_S = float(sys.argv[2])
arena = Arena.create(1 << 20, 1)
ram = RamTier(arena.num_bytes)
writing = writer.Writer(Tier(), ram, arena.buffer)
for number in range(3):
    ram.release(fill(ram, arena, identity(number), SHAPE, features(number)))
    writing.hand(identity(number), SHAPE)
"""


@pytest.mark.process
@pytest.mark.parametrize(("write_s", "exit_s", "written"), [(0.05, LONG_S, 3), (1000, 0.1, 0)])
def test_the_end_of_the_process(write_s: float, exit_s: float, written: int) -> None:
    """What waits is written first; a tier that hangs keeps no process from its end."""
    done = subprocess.run(
        [sys.executable, "-c", EXIT, str(write_s), str(exit_s)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [identity(number).key for number in range(written)]


def test_what_it_writes_can_be_read(writer: Writer, tier: MemoryTier, ram: RamTier, arena: Arena) -> None:
    put(ram, arena, 7, writer)
    assert writer.flush(LONG_S)
    (one,) = tier.packages.values()
    assert unpack(one) == (identity(7), SHAPE, features(7))
