# SPDX-License-Identifier: Apache-2.0
"""An update of weights in parts is one change from its start to its end: no features are taken or kept within it.

By the hooks around vLLM's worker, with a model that is neither the old nor the new one between two parts.
"""

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.packages import features
from tests.support.tiers import LONG_S
from tests.unit.components.features.engine.test_transfers import CPU, Engine
from tests.unit.components.features.worker.test_rank import given, step
from tests.unit.components.features.worker.test_weights import Model
from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.engine.ram_tier import ALIGN_BYTES
from vllm_mmcache.components.features.message import Message
from vllm_mmcache.components.features.worker import hooks
from vllm_mmcache.components.features.worker.device_copies import DeviceCopies
from vllm_mmcache.components.features.worker.opening import RANK_FEATURES
from vllm_mmcache.components.features.worker.rank import RankFeatures
from vllm_mmcache.components.features.worker.tower import Tower


class Rig:
    """An engine, and a worker of which vLLM is asked to change the weights."""

    def __init__(self, *, is_hooked: bool = True) -> None:
        self.engine = Engine(1, 64 * ALIGN_BYTES)
        arena = Arena.open(self.engine.arena.address)
        self.model = Model()
        tower = Tower(self.model)
        tower.watch(notes=False)
        self.rank = RankFeatures(tower, DeviceCopies(arena, 0, CPU), arena.board[0:1])
        self.rank.know_weights()
        self.worker = SimpleNamespace(
            model_runner=SimpleNamespace(**{RANK_FEATURES: self.rank}), _weight_update_active=False
        )
        self._is_hooked = is_hooked

    def _ask(self, hook: Callable[..., Any], does: Callable[[], Any] = lambda: None) -> None:
        if self._is_hooked or hook is not hooks.begin_update:
            hook(does, self.worker, (), {})
        else:
            does()

    def start(self, does: Callable[[], Any] = lambda: None) -> None:
        self._ask(hooks.begin_update, does)

    def finish(self, does: Callable[[], Any] = lambda: None) -> None:
        self._ask(hooks.end_update, does)

    def reset(self) -> None:
        self._ask(hooks.expect_new_weights)

    def receive(self, index: int, value: float) -> None:
        """One part, as a transfer that writes into parameters without load_weights."""
        self.model.visual[index].data.fill_(value)

    def serve(self, number: int) -> bool:
        """A step with a new image, as engine and rank go through it; whether its features were kept."""
        generation = self.engine.ranks.generation()
        message = Message(generation or 1, saves=[self.engine.save(number)[0]])
        step(self.rank, message, {f"image-{number}": given(number)})
        assert self.engine.copying.wait(LONG_S)
        return self.engine.kept(number) == features(number)

    def is_known(self) -> bool:
        return self.rank.weights.wait(LONG_S)

    def close(self) -> None:
        self.rank.close()
        self.engine.close()


@pytest.fixture
def open_rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def opened(**more: Any) -> Rig:
        made.append(Rig(**more))
        return made[-1]

    yield opened
    for rig in made:
        rig.close()


@pytest.mark.parametrize("is_hooked", [True, False])
def test_nothing_is_kept_between_two_parts(open_rig: Callable[..., Rig], is_hooked: bool) -> None:
    """The control: where the start is not said, features of weights that nobody has given are kept under their name."""
    rig = open_rig(is_hooked=is_hooked)
    assert rig.serve(0)
    old = rig.engine.ranks.identity("image")
    rig.start()
    for index in range(4):
        rig.receive(index, 1.0)
        rig.reset()  # as vLLM does it between
        assert rig.is_known() != is_hooked
        assert rig.serve(index + 1) != is_hooked
        assert (rig.engine.ranks.identity("image") is None) == is_hooked
    rig.finish()
    assert rig.is_known()
    new = rig.engine.ranks.identity("image")
    assert None is not new != old
    assert rig.serve(9)


def test_weights_that_have_no_memory_between_two_parts_are_not_read(
    open_rig: Callable[..., Rig], log: pytest.LogCaptureFixture
) -> None:
    """vLLM loads layer by layer into memory that it makes then. The control: before the update is said to begin."""
    rig = open_rig()
    there = rig.model.visual[0]
    rig.model.visual[0] = torch.nn.Parameter(torch.empty(8, device="meta"))
    rig.rank.weights.mark_unknown()
    assert not rig.is_known()
    assert log.text.count("could not read the vision weights") == 1
    rig.start()
    rig.reset()
    assert not rig.is_known()
    rig.model.visual[0] = there
    rig.finish()
    assert rig.is_known()
    assert [record.levelno for record in log.records if record.levelno >= logging.ERROR] == [logging.ERROR]


def fails() -> None:
    raise RuntimeError("the trainer is gone, says a test")


def test_an_update_that_can_t_begin_is_none(open_rig: Callable[..., Rig]) -> None:
    rig = open_rig()
    with pytest.raises(RuntimeError, match="says a test"):
        rig.start(fails)
    assert rig.is_known()
    assert rig.serve(0)


@pytest.mark.parametrize("heals", ["the next one", "a reload"])
def test_after_one_that_fails_nothing_is_kept_until_weights_are_whole(open_rig: Callable[..., Rig], heals: str) -> None:
    rig = open_rig()
    rig.start()
    rig.receive(0, 1.0)
    with pytest.raises(RuntimeError, match="says a test"):
        rig.finish(fails)
    assert not rig.is_known()
    assert not rig.serve(0)
    if heals == "the next one":
        rig.start()
        assert not rig.is_known()
    rig.finish(lambda: rig.model.fill(2.0))  # which a reload ends with, too
    assert rig.is_known()
    assert rig.serve(1)


def test_a_second_start_within_one_does_not_end_it(open_rig: Callable[..., Rig]) -> None:
    """vLLM refuses it, and the first one goes on."""
    rig = open_rig()
    rig.start()
    rig.worker._weight_update_active = True
    with pytest.raises(RuntimeError, match="says a test"):
        rig.start(fails)
    assert not rig.is_known()
    rig.finish()
    assert rig.is_known()
