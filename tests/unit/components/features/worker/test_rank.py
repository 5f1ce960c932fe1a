# SPDX-License-Identifier: Apache-2.0
"""A rank's side around a step's encoding, and the engine's beside it: what is taken, what is kept, of which weights."""

from collections.abc import Iterator

import pytest
import torch

from tests.support.packages import SHAPE, features, identity
from tests.support.rank_process import raw
from tests.support.tiers import LONG_S
from tests.unit.components.features.engine.test_transfers import CPU, Engine
from tests.unit.components.features.worker.test_weights import Model
from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.engine.ram_tier import ALIGN_BYTES
from vllm_mmcache.components.features.message import Message
from vllm_mmcache.components.features.worker.device_copies import DeviceCopies
from vllm_mmcache.components.features.worker.rank import Outputs, RankFeatures
from vllm_mmcache.components.features.worker.tower import Tower
from vllm_mmcache.metrics import counters


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(1, 64 * ALIGN_BYTES)
    yield made
    made.close()


@pytest.fixture
def side(engine: Engine) -> Iterator[RankFeatures]:
    """Whose weights are known."""
    arena = Arena.open(engine.arena.address)
    made = RankFeatures(Tower(Model()), DeviceCopies(arena, 0, CPU), arena.board[0:1])
    made.know_weights()
    yield made
    made.close()


def given(number: int) -> torch.Tensor:
    """What the tower gives. Shapes: (num_tokens, width)."""
    flat = torch.frombuffer(bytearray(features(number)), dtype=torch.bfloat16)
    return flat.view(SHAPE.num_tokens, SHAPE.width)


def step(side: RankFeatures, message: Message | None, new: Outputs) -> tuple[set[str], Outputs]:
    """One in which the tower gives what is `new`; which names needed no run, and vLLM's encoder cache after it."""
    outputs: Outputs = {}
    with side.encoding(message, outputs) as taken:
        assert outputs.keys() == taken
        outputs |= {name: one for name, one in new.items() if name not in taken}
    return taken, outputs


def test_what_is_there_is_taken_and_what_is_new_is_kept(engine: Engine, side: RankFeatures) -> None:
    engine.put(0)
    message = Message(engine.ranks.generation())
    message.loads.append(engine.load(0)[0])
    message.saves.append(engine.save(1)[0])
    taken, outputs = step(side, message, {"image-1": given(1)})
    assert taken == {"image-0"}
    assert {name: raw(one) for name, one in outputs.items()} == {"image-0": features(0), "image-1": features(1)}
    assert engine.copying.wait(LONG_S)
    assert engine.kept(1) == features(1)
    assert step(side, None, {"image-2": given(2)})[0] == set()  # the control: without a message nothing happens
    assert engine.kept(2) is None


@pytest.mark.parametrize("behind", [0, 1])
def test_features_of_other_weights_are_left_alone(engine: Engine, side: RankFeatures, behind: int) -> None:
    """The rank's changed after the engine had told it; the control: they did not."""
    engine.put(0)
    message = Message(engine.ranks.generation())
    load, held = engine.load(0)
    message.loads.append(load)
    message.saves.append(engine.save(1)[0])
    if behind:
        with side.weights.changing():
            pass
        assert side.weights.wait(LONG_S)
        assert engine.ranks.generation() > message.generation
    taken, outputs = step(side, message, {f"image-{number}": given(number + 2 * behind) for number in range(2)})
    assert taken == (set() if behind else {"image-0"})
    assert raw(outputs["image-0"]) == features(2 * behind)
    assert engine.copying.wait(LONG_S)  # the engine need not wait for it
    assert held.num_holders == 0
    assert engine.kept(1) == (None if behind else features(1))


def test_weights_that_are_being_changed_are_not_known(engine: Engine, side: RankFeatures) -> None:
    before = engine.ranks.generation()
    known = engine.ranks.identity("image")
    assert known is not None
    with side.weights.changing():
        assert engine.ranks.identity("image") is None
        side.tower._model.fill(1.0)
    assert side.weights.wait(LONG_S)
    assert engine.ranks.generation() > before
    assert engine.ranks.identity("image") != known
    with side.weights.changing():
        side.tower._model.fill(0.0)
    assert side.weights.wait(LONG_S)
    assert engine.ranks.identity("image") == known  # the same weights as at first


@pytest.mark.parametrize("is_alone", [True, False])
def test_an_error_while_loading_ends_one_of_several_ranks(
    engine: Engine, is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is alone runs the tower instead."""

    def no_memory(self: DeviceCopies, places: object) -> object:
        raise MemoryError("no memory on this rank, says a test")

    arena = Arena.open(engine.arena.address)
    rank = RankFeatures(Tower(Model()), DeviceCopies(arena, 0, CPU), arena.board[0:1], is_alone=is_alone)
    rank.know_weights()
    engine.put(0)
    message = Message(engine.ranks.generation(), loads=[engine.load(0)[0]])
    monkeypatch.setattr(DeviceCopies, "load", no_memory)
    try:
        if is_alone:
            assert step(rank, message, {"image-0": given(0)})[0] == set()
        else:
            with pytest.raises(SystemExit, match="no memory on this rank"):
                step(rank, message, {})
    finally:
        rank.close()


def test_only_what_this_step_made_is_kept(engine: Engine, side: RankFeatures) -> None:
    """V2 does not encode what its cache has, whoever put it there. The control is the image that is encoded."""
    message = Message(engine.ranks.generation(), saves=[engine.save(number)[0] for number in (1, 2)])
    outputs = {"image-1": given(3)}
    before = counters.TOWER_TOKENS.value
    with side.encoding(message, outputs):
        outputs |= {"image-2": given(2), "image-4": given(4)}
    assert engine.copying.wait(LONG_S)
    assert engine.kept(1) is None
    assert engine.kept(2) == features(2)
    assert counters.TOWER_TOKENS.value - before == 2 * SHAPE.num_tokens, "of the two, kept or not"


MISFITS = {
    "nothing": None,
    "fewer tokens": given(1)[:-1],
    "flat": given(1).reshape(-1),
    "another width": given(1)[:, :-1],
    "one level more": given(1).repeat(1, 2),
    "another dtype": given(1).to(torch.float32),
    "another dtype of that size": given(1).view(torch.float16),
}


@pytest.mark.parametrize("seen", MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_not_kept(
    engine: Engine, side: RankFeatures, seen: torch.Tensor | None, caplog: pytest.LogCaptureFixture
) -> None:
    """And is used all the same: it is what the tower gave."""
    for fits in (False, True):  # the control
        message = Message(engine.ranks.generation(), saves=[engine.save(1)[0]])
        new = {"image-1": given(1)} if fits else {} if seen is None else {"image-1": seen}
        _, outputs = step(side, message, new)
        assert outputs == new
        assert engine.copying.wait(LONG_S)
        assert engine.kept(1) == (features(1) if fits else None)
    assert len(caplog.records) == (seen is not None)


def test_the_engine_learns_what_the_tower_takes(engine: Engine, side: RankFeatures) -> None:
    with side.encoding(None, {}):
        pass
    side.copies.flush()
    assert not engine.arena.board["tower_s"].any()  # nothing ran
    outputs: Outputs = {"image-0": given(0)}
    with side.encoding(None, outputs):
        outputs |= {"image-1": given(1), "image-2": given(2)}
        side.ran(lambda: 0.25)
        side.ran(lambda: 0.75)
    side.copies.flush()
    (per_token,) = {float(one) for one in engine.arena.board["tower_s"][0] if one}
    assert per_token == 1.0 / 2 / SHAPE.num_tokens


def test_an_image_that_is_loaded_is_what_was_saved_under_its_identity(engine: Engine, side: RankFeatures) -> None:
    """Over a few steps, as engine and rank go through them."""
    for number in (0, 1, 0, 2, 1, 0):
        message = Message(engine.ranks.generation())
        is_there = engine.store.ram.has(identity(number).key)
        if is_there:
            message.loads.append(engine.load(number)[0])
        else:
            message.saves.append(engine.save(number)[0])
        taken, outputs = step(side, message, {f"image-{number}": given(number)})
        assert bool(taken) == is_there
        assert raw(outputs[f"image-{number}"]) == features(number)
        assert engine.copying.wait(LONG_S)
    assert engine.store.counts()["ram"]["saved"] == 3
