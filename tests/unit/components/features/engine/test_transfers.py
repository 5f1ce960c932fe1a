# SPDX-License-Identifier: Apache-2.0
"""Engine and ranks copy features through the arena: a slot stays while a rank copies, and what is kept is sealed."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.packages import SHAPE, features, identity
from tests.support.rank_process import raw, tensor
from tests.support.refusals import no_threads
from tests.support.tiers import LONG_S, within
from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.engine.cost_model import CostModel
from vllm_mmcache.components.features.engine.ram_tier import ALIGN_BYTES, RamTier, Slot
from vllm_mmcache.components.features.engine.store import Store
from vllm_mmcache.components.features.engine.transfers import Ranks, TransferTracker
from vllm_mmcache.components.features.message import SEAL_BYTES, SlotRef
from vllm_mmcache.components.features.package import Shape
from vllm_mmcache.components.features.worker.device_copies import DeviceCopies, Unpinnable

FACTS = {"width": SHAPE.width, "dtype": SHAPE.dtype, "model": "model", "processor": "processor", "layout": "shared"}
CPU = torch.device("cpu")
ODD = [
    Shape(num_tokens, width, dtype)
    for dtype in ("bfloat16", "float16", "float32")
    for num_tokens, width in ((1, 1), (1, 3), (7, 5), (257, 129))
]


class Engine:
    """The engine's part: an arena, a store with nothing below, and what follows the ranks."""

    def __init__(self, num_ranks: int, num_bytes: int) -> None:
        self.arena = Arena.create(num_bytes, num_ranks)
        self.ranks = Ranks(self.arena, [FACTS] * num_ranks)
        self.store = Store(self.arena, RamTier(self.arena.num_bytes), [], CostModel(lambda num_tokens: None, None))
        self.copying = TransferTracker(self.store, self.arena, self.ranks)

    def save(self, number: int, shape: Shape = SHAPE) -> tuple[SlotRef, Slot]:
        """Component for what a rank shall save."""
        slot = self.store.reserve(identity(number), shape)
        assert slot is not None
        return self.copying.save(f"image-{number}", slot, identity(number), shape), slot

    def load(self, number: int, shape: Shape = SHAPE) -> tuple[SlotRef, Slot]:
        """What ranks shall load."""
        slot = self.store.find(identity(number), shape)
        assert slot is not None
        return self.copying.load(f"image-{number}", slot, shape), slot

    def put(self, number: int) -> None:
        """Into RAM, without a rank."""
        slot = self.store.reserve(identity(number), SHAPE)
        assert slot is not None
        self.arena.buffer(slot.offset, SHAPE.num_bytes)[:] = features(number)
        self.store.keep(slot, identity(number), SHAPE)

    def kept(self, number: int, shape: Shape = SHAPE) -> bytes | None:
        slot = self.store.find(identity(number), shape)
        if slot is None:
            return None
        seen = bytes(self.arena.buffer(slot.offset, shape.num_bytes))
        self.store.release(slot)
        return seen

    def held_bytes(self) -> float:
        return self.store.ram.counts.snapshot()["held_bytes"]

    def close(self) -> None:
        self.copying.close()
        self.store.close(LONG_S)
        self.arena.close()


@pytest.fixture
def open_engine() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def opened(num_ranks: int = 1, num_bytes: int = 256 * ALIGN_BYTES) -> Engine:
        made.append(Engine(num_ranks, num_bytes))
        return made[-1]

    yield opened
    for engine in made:
        engine.close()


@pytest.fixture
def engine(open_engine: Callable[..., Engine]) -> Engine:
    """Of one rank."""
    return open_engine()


@pytest.fixture
def open_copies() -> Iterator[Callable[..., DeviceCopies]]:
    """Ranks in this process, as with one process per engine."""
    made: list[DeviceCopies] = []

    def opened(engine: Engine, row: int = 0) -> DeviceCopies:
        made.append(DeviceCopies(Arena.open(engine.arena.address), row, CPU))
        return made[-1]

    yield opened
    for copies in made:
        copies.close()


def test_what_is_loaded_is_held_until_every_rank_has_it(open_engine: Any, open_copies: Any) -> None:
    """Two ranks, one of which lags; the control: when it is there, too, the slot can go."""
    engine = open_engine(num_ranks=2, num_bytes=ALIGN_BYTES)
    quick, lagging = open_copies(engine, 0), open_copies(engine, 1)
    go_on = threading.Event()
    lagging.then(lambda: go_on.wait(LONG_S))
    engine.put(0)
    place, slot = engine.load(0)
    for copies in (quick, lagging):
        (seen,) = copies.load([place])
        assert raw(seen) == features(0)
    quick.flush()
    assert engine.arena.board["loads_done"].tolist() == [1, 0]
    assert not engine.copying.wait(0.02)
    assert slot.num_holders == 1
    assert engine.store.reserve(identity(1), SHAPE) is None  # nothing can take its place
    go_on.set()
    assert engine.copying.wait(LONG_S)
    assert slot.num_holders == 0
    assert engine.store.reserve(identity(1), SHAPE) is not None


def test_what_was_loaded_is_the_ranks_own(engine: Engine, open_copies: Any) -> None:
    copies = open_copies(engine)
    engine.put(0)
    place, _ = engine.load(0)
    (seen,) = copies.load([place])
    engine.arena.buffer(place.offset, SHAPE.num_bytes)[:] = bytes(SHAPE.num_bytes)
    assert raw(seen) == features(0)


def test_several_loads_at_once_and_none(engine: Engine, open_copies: Any) -> None:
    copies = open_copies(engine)
    assert copies.load([]) == []
    copies.skip([])
    for number in range(5):
        engine.put(number)
    loads = [engine.load(number) for number in range(5)]
    assert [place.number for place, _ in loads] == [1, 2, 3, 4, 5]
    seen = copies.load([place for place, _ in loads[:3]])
    assert [raw(one) for one in seen] == [features(number) for number in range(3)]
    copies.flush()
    assert engine.arena.board["loads_done"].tolist() == [3]
    while sum(slot.num_holders for _, slot in loads) > 2:
        time.sleep(0.001)
    assert not engine.copying.wait(0.02)
    assert [slot.num_holders for _, slot in loads] == [0, 0, 0, 1, 1]
    copies.skip([place for place, _ in loads[3:]])  # not wanted after all
    assert engine.copying.wait(LONG_S)
    assert [slot.num_holders for _, slot in loads] == [0] * 5


def test_a_load_that_a_rank_never_heard_of_ends_with_the_next(engine: Engine, open_copies: Any) -> None:
    copies = open_copies(engine)
    engine.put(0)
    (_, first), (place, second) = engine.load(0), engine.load(0)
    assert first is second
    copies.load([place])
    assert engine.copying.wait(LONG_S)
    assert first.num_holders == 0


def test_a_load_ends_when_its_slot_is_released(
    engine: Engine, open_copies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waited finds it so, also where the thread that looks at the board is slow."""
    release = engine.store.release

    def slowly(slot: Slot) -> None:
        time.sleep(0.05)
        release(slot)

    engine.put(0)
    place, slot = engine.load(0)
    monkeypatch.setattr(engine.store, "release", slowly)
    open_copies(engine).load([place])
    assert engine.copying.wait(LONG_S)
    assert slot.num_holders == 0


@pytest.mark.parametrize("shape", ODD, ids=str)
def test_what_is_saved_is_kept_to_the_bit(engine: Engine, open_copies: Any, shape: Shape) -> None:
    """Any bits: numbers that are none, infinities, and the smallest; also where the tower gives a view."""
    copies = open_copies(engine)
    for number, seen in ((0, features(0, shape)), (1, features(1, shape))):
        place, slot = engine.save(number, shape)
        whole = tensor(place, bytes(seen))
        if number:
            whole = torch.cat([whole, whole]).t().contiguous().t()[: shape.num_tokens]
        copies.save(place, whole)
        assert engine.copying.wait(LONG_S)
        assert slot.num_holders == 0
        assert engine.kept(number, shape) == seen
        place, _ = engine.load(number, shape)
        (loaded,) = copies.load([place])
        assert (tuple(loaded.shape), loaded.dtype) == ((shape.num_tokens, shape.width), whole.dtype)
        assert raw(loaded) == seen


@pytest.mark.parametrize("closes", [True, False])
def test_no_thread_to_look_at_the_board(engine: Engine, open_copies: Any, closes: bool) -> None:
    """What was to be copied is refused, and nobody waits for it; the control: later there are threads again."""
    with no_threads():
        slot = engine.store.reserve(identity(0), SHAPE)
        assert slot is not None
        with pytest.raises(RuntimeError, match="new thread"):
            engine.copying.save("image-0", slot, identity(0), SHAPE)
        engine.store.discard(slot, identity(0))
        assert engine.held_bytes() == 0
    assert engine.copying.wait(0)
    if closes:
        engine.copying.close()
        return
    copies = open_copies(engine)
    place, _ = engine.save(1)
    copies.save(place, tensor(place, features(1)))
    assert engine.copying.wait(LONG_S)
    assert engine.kept(1) == features(1)


def test_a_rank_without_features_makes_the_engine_give_up(engine: Engine, open_copies: Any) -> None:
    copies = open_copies(engine)
    place, _ = engine.save(0)
    fetch = engine.store.fetch(identity(0), SHAPE)
    copies.save(place, None)
    assert engine.copying.wait(LONG_S)
    assert (fetch.is_done, fetch.source) == (True, "")
    assert engine.kept(0) is None
    assert engine.held_bytes() == 0
    place, _ = engine.save(0)  # the control: the next time it has them
    copies.save(place, tensor(place, features(0)))
    assert engine.copying.wait(LONG_S)
    assert engine.kept(0) == features(0)


@pytest.mark.parametrize("seal", [0, 1, 2, 3, 1 << 40])
def test_only_the_right_seal_keeps(engine: Engine, seal: int) -> None:
    """Whatever the board says; the second save's seal is 2."""
    places = [engine.save(number) for number in range(2)]
    place, slot = places[1]
    engine.arena.buffer(place.offset, SHAPE.num_bytes)[:] = features(1)
    engine.arena.buffer(place.offset + SHAPE.num_bytes, SEAL_BYTES)[:] = seal.to_bytes(SEAL_BYTES, "little")
    engine.arena.board["saves_done"] = 2
    assert engine.copying.wait(LONG_S)
    assert engine.kept(0) is None
    assert engine.kept(1) == (features(1) if seal == 2 else None)
    assert slot.num_holders == 0


def test_an_old_seal_is_none(engine: Engine, open_copies: Any) -> None:
    """Memory that is used again still holds one, which could be taken for the next one's."""
    copies = open_copies(engine)
    place, slot = engine.save(0)
    seal = engine.arena.buffer(place.offset + SHAPE.num_bytes, SEAL_BYTES)
    copies.save(place, tensor(place, features(0)))
    assert engine.copying.wait(LONG_S)
    assert int.from_bytes(seal, "little") == 1
    engine.store.ram.clear()
    seal[:] = (2).to_bytes(SEAL_BYTES, "little")
    place, slot = engine.save(1)
    assert (place.number, place.offset) == (2, slot.offset)
    copies.save(place, None)
    assert engine.copying.wait(LONG_S)
    assert engine.kept(1) is None


def test_only_the_first_rank_saves(open_engine: Any, open_copies: Any) -> None:
    """Another one's features may differ in the last bit, and may come when others are there."""
    engine = open_engine(num_ranks=2)
    first, second = open_copies(engine, 0), open_copies(engine, 1)
    place, slot = engine.save(0)
    second.save(place, tensor(place, features(1)))
    second.flush()
    assert not engine.copying.wait(0.02)  # it has nothing to say
    assert bytes(engine.arena.buffer(slot.offset, slot.num_bytes)) == bytes(slot.num_bytes)
    first.save(place, tensor(place, features(0)))
    assert engine.copying.wait(LONG_S)
    assert engine.kept(0) == features(0)


def test_a_copy_that_fails_holds_up_nothing(engine: Engine, open_copies: Any, caplog: pytest.LogCaptureFixture) -> None:
    copies = open_copies(engine)
    place, slot = engine.save(0)
    copies.save(place, torch.zeros(3, 5))  # of another shape
    assert engine.copying.wait(LONG_S)
    assert slot.num_holders == 0
    assert engine.kept(0) is None
    copies.flush()  # it is logged after the engine was told
    assert "a copy of features failed" in caplog.text
    place, _ = engine.save(1)
    copies.save(place, tensor(place, features(1)))
    assert engine.copying.wait(LONG_S)
    assert engine.kept(1) == features(1)


def test_what_is_being_saved_is_no_ones_yet(engine: Engine, open_copies: Any) -> None:
    copies = open_copies(engine)
    go_on = threading.Event()
    copies.then(lambda: go_on.wait(LONG_S))
    place, slot = engine.save(0)
    fetch = engine.store.fetch(identity(0), SHAPE)
    copies.save(place, tensor(place, features(0)))
    assert not engine.copying.wait(0.02)
    assert not fetch.is_done
    assert engine.kept(0) is None
    assert engine.store.reserve(identity(0), SHAPE) is None
    go_on.set()
    assert engine.store.wait([fetch], LONG_S)
    assert fetch.source == "ram"
    assert engine.kept(0) == features(0)
    assert slot.num_holders == 0


def test_numbers_of_each_kind_are_in_order(engine: Engine, open_copies: Any) -> None:
    copies = open_copies(engine)
    numbers: dict[str, list[int]] = {"loads": [], "saves": []}
    for number in range(10):
        place, _ = engine.save(number)
        numbers["saves"].append(place.number)
        copies.save(place, tensor(place, features(number)) if number % 3 else None)
        assert engine.copying.wait(LONG_S)
        if number % 3:
            place, _ = engine.load(number)
            numbers["loads"].append(place.number)
            copies.load([place])
    assert engine.copying.wait(LONG_S)
    assert numbers == {"loads": [1, 2, 3, 4, 5, 6], "saves": list(range(1, 11))}
    (row,) = engine.arena.board
    assert (int(row["loads_done"]), int(row["saves_done"])) == (6, 10)


@pytest.mark.slow
def test_nothing_stays_open() -> None:
    """Neither the engine's memory nor the rank's view of it, whether they are closed or forgotten."""
    gc.collect()
    before = open_files()
    for closes in (True, False):
        engine = Engine(1, ALIGN_BYTES)
        copies = DeviceCopies(Arena.open(engine.arena.address), 0, CPU)
        place, _ = engine.save(0)
        copies.save(place, tensor(place, features(0)))
        assert engine.copying.wait(LONG_S)
        assert open_files() - before
        copies.close()
        engine.copying.close()
        if closes:
            engine.close()
        del copies, engine
        assert within(LONG_S, lambda: gc.collect() >= 0 and not open_files() - before)  # threads end first


def open_files() -> set[int]:
    """Inodes of the arenas that this process maps or holds open; those of earlier tests may still go."""
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:vllm-mmcache" in line]
    opened = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # other threads of this process close theirs meanwhile
            if "memfd:vllm-mmcache" in os.readlink(f"/proc/self/fd/{name}"):
                opened.add(os.stat(f"/proc/self/fd/{name}").st_ino)
    return {int(line.split()[4]) for line in mapped} | opened


def test_a_device_of_another_kind(engine: Engine) -> None:
    with pytest.raises(Unpinnable, match="a device of type meta"):
        DeviceCopies(engine.arena, 0, torch.device("meta"))


@pytest.mark.parametrize("torn", [True, False])
def test_a_fingerprint_that_changes_while_it_is_read(open_engine: Any, torn: bool) -> None:
    """The control: without a change the weights are known."""
    engine = open_engine(num_ranks=2)
    board = engine.arena.board
    board["generation"] = 1
    board["fingerprint"] = b"a" * 64

    class Changing:
        def __getitem__(self, field: str) -> Any:
            if field == "fingerprint" and torn:
                board["generation"][1] = 0
                board["fingerprint"][1] = b"b" * 64
            return board[field]

    engine.ranks._board = Changing()
    assert engine.ranks.generation() == (0 if torn else 1)
    board["generation"] = 2
    torn = False
    assert engine.ranks.generation() == 2


def test_what_the_engine_knows_of_its_ranks(engine: Engine) -> None:
    assert engine.ranks.shape(7) == Shape(7, SHAPE.width, SHAPE.dtype)
    engine.arena.board["generation"], engine.arena.board["fingerprint"] = 1, b"a" * 64
    one, other = engine.ranks.identity("one"), engine.ranks.identity("other")
    assert one is not None
    assert other is not None
    assert (one.identifier, one.processor, one.dtype, one.layout) == ("one", "processor", SHAPE.dtype, "shared")
    assert one.model == other.model != FACTS["model"]
