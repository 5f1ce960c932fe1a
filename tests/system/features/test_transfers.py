# SPDX-License-Identifier: Apache-2.0
"""Engine and ranks copy features between processes, also when a rank is killed while it copies."""

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.packages import SHAPE, features
from tests.support.rank_process import serve
from tests.support.sizes import scaled
from tests.support.tiers import LONG_S
from tests.unit.components.features.engine.test_transfers import Engine, engine, open_engine
from vllm_mmcache.components.features.engine.ram_tier import ALIGN_BYTES
from vllm_mmcache.components.features.package import Shape

__all__ = ["engine", "open_engine"]


@dataclass
class Rank:
    """One in a process of its own."""

    process: Any
    pipe: Any

    def do(self, *what: object) -> Any:
        self.pipe.send(what)
        assert self.pipe.poll(LONG_S)
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()  # SIGKILL
        self.process.join(LONG_S)


@pytest.fixture
def start_rank() -> Iterator[Callable[..., Rank]]:
    spawning = multiprocessing.get_context("spawn")
    made: list[Rank] = []

    def started(engine: Engine, row: int = 0) -> Rank:
        ours, theirs = spawning.Pipe()
        process = spawning.Process(target=serve, args=(engine.arena.address, row, theirs), daemon=True)
        process.start()
        made.append(Rank(process, ours))
        return made[-1]

    yield started
    for rank in made:
        rank.kill()


@pytest.mark.process
def test_two_processes(open_engine: Any, start_rank: Any) -> None:
    engine = open_engine(num_ranks=2)
    ranks = [start_rank(engine, row) for row in range(2)]
    for number in range(6):
        place, _ = engine.save(number)
        assert {rank.do("save", place, bytes(features(number))) for rank in ranks} == {place.number}
    assert engine.copying.wait(LONG_S)
    loads = [engine.load(number) for number in range(6)]
    places = [place for place, _ in loads]
    assert ranks[0].do("load", places) == [features(number) for number in range(6)]
    assert not engine.copying.wait(0.02)
    assert {slot.num_holders for _, slot in loads} == {1}
    assert ranks[1].do("load", places) == [features(number) for number in range(6)]
    assert engine.copying.wait(LONG_S)
    assert {slot.num_holders for _, slot in loads} == {0}
    assert [rank.do("end") for rank in ranks] == ["ended"] * 2


@pytest.mark.process
def test_a_rank_is_killed_in_the_middle_of_a_copy(engine: Engine, start_rank: Any) -> None:
    """What it had sealed is kept, and nothing else; the engine's threads go on."""
    rank = start_rank(engine)
    for number in range(3):
        place, _ = engine.save(number)
        rank.do("save", place, bytes(features(number)))
    assert engine.copying.wait(LONG_S)
    half, slot = engine.save(3)
    assert rank.do("hang", half, bytes(features(3))) == 4
    after, _ = engine.save(4)
    rank.do("save", after, bytes(features(4)))
    rank.kill()
    assert not engine.copying.wait(0.02)
    seen = bytes(engine.arena.buffer(slot.offset, SHAPE.num_bytes))
    assert seen != features(3)
    assert seen[: SHAPE.num_bytes // 2] == features(3)[: SHAPE.num_bytes // 2]
    assert [engine.kept(number) for number in range(5)] == [*(features(number) for number in range(3)), None, None]
    again = start_rank(engine)  # what a new one says of later saves ends those of the dead one, unsealed
    place, _ = engine.save(5)
    again.do("save", place, bytes(features(5)))
    assert engine.copying.wait(LONG_S)
    assert [engine.kept(number) for number in range(3, 6)] == [None, None, features(5)]


@pytest.mark.process
def test_a_rank_is_killed_at_any_moment(open_engine: Any, start_rank: Any) -> None:
    """While it copies as fast as it can: what is kept is whole, and what it was done with is kept."""
    shape = Shape(1024, 512, "bfloat16")
    drawn = random.Random(0)
    for _ in range(scaled(3)):
        engine = open_engine(num_bytes=16 * (shape.num_bytes + ALIGN_BYTES))
        rank = start_rank(engine)
        rank.do("load", [])  # it is there
        for number in range(12):
            place, _ = engine.save(number, shape)
            rank.pipe.send(("save", place, bytes(features(number, shape))))
        num_done = drawn.randrange(1, 6)
        while engine.ranks.saved() < num_done:
            time.sleep(0.0005)
        rank.kill()
        copied = engine.ranks.saved()
        while len(engine.copying._saves) > 12 - copied:
            time.sleep(0.001)
        kept = [engine.kept(number, shape) for number in range(12)]
        assert kept == [features(number, shape) if number < copied else None for number in range(12)]


@pytest.mark.process
def test_the_weights_are_known_when_all_ranks_know_theirs(open_engine: Any, start_rank: Any) -> None:
    engine = open_engine(num_ranks=2)
    ranks, board = engine.ranks, engine.arena.board
    first, second = start_rank(engine, 0), start_rank(engine, 1)
    assert (ranks.generation(), ranks.identity("image")) == (0, None)
    first.do("know", 1, "a" * 64)
    assert (ranks.generation(), ranks.identity("image")) == (0, None)  # the other one does not know its own
    second.do("know", 1, "b" * 64)
    assert ranks.generation() == 1
    known = ranks.identity("image")
    board["generation"][1] = 0  # doubted
    assert (ranks.generation(), ranks.identity("image")) == (0, None)
    second.do("know", 2, "c" * 64)
    assert (ranks.generation(), ranks.identity("image")) == (0, None)  # rows differ
    first.do("know", 2, "a" * 64)
    assert ranks.generation() == 2
    changed = ranks.identity("image")
    assert known is not None
    assert changed is not None
    assert known.model != changed.model
    first.do("know", 3, "a" * 64)
    second.do("know", 3, "b" * 64)
    assert ranks.identity("image") == known  # the weights that there were before
    first.do("know", 4, "b" * 64)
    second.do("know", 4, "a" * 64)
    assert ranks.identity("image") != known
