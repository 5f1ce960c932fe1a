# SPDX-License-Identifier: Apache-2.0
"""The fingerprint is of weights that were there all at once, or it is unknown; and nobody waits for it.

Readings are stopped in their midst by a gate, so nothing here depends on time.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from tests.support.tiers import LONG_S
from vllm_mmcache.components.features.worker import weights
from vllm_mmcache.components.features.worker.tower import Tower
from vllm_mmcache.components.features.worker.weights import Fingerprints
from vllm_mmcache.content.digests import inputs_digest, tensors_digest


class Model(torch.nn.Module):
    """Four tensors of a tower, and a language model."""

    _language_model_names = ("language_model",)

    def __init__(self) -> None:
        super().__init__()
        self.visual = torch.nn.ParameterList(torch.zeros(8) for _ in range(4))
        self.language_model = torch.nn.Linear(2, 2)

    def load_weights(self, loaded: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in loaded:
            self.get_parameter(name).data.copy_(tensor)

    def fill(self, value: float) -> None:
        for parameter in self.visual:
            parameter.data.fill_(value)


class Gate:
    """Stops each reading before its third piece; `reads` counts pieces."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arrived, self.open, self.reads = threading.Event(), threading.Event(), 0
        monkeypatch.setattr(weights, "tensors_digest", self._digest)

    def _digest(self, tensors: Iterable[tuple[str, torch.Tensor]], check: Callable[[], None]) -> str:
        reads = 0

        def gated() -> None:
            nonlocal reads
            reads += 1
            self.reads += 1
            if reads == 5:  # each tensor is one piece, with a check of its own
                self.arrived.set()
                assert self.open.wait(LONG_S)
            check()

        return tensors_digest(tensors, gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    one = Gate(monkeypatch)
    yield one
    one.open.set()


class Rig:
    def __init__(self) -> None:
        self.model = Model()
        self.tower = Tower(self.model)
        self.tower.watch(notes=True)
        self.published: list[tuple[int, str]] = []
        self.fingerprints = Fingerprints(self.tower, lambda *row: self.published.append(row))


@pytest.fixture
def rig() -> Iterator[Rig]:
    one = Rig()
    yield one
    one.fingerprints.close()


def of(tower: Tower) -> str:
    """By the definition."""
    loaded = "".join(f"{name} {digest}\n" for name, digest in sorted(tower.loaded.items()))
    return inputs_digest({"loaded": loaded, "here": tensors_digest(tower.tensors())})


def test_it_is_taken_in_the_background_and_once(rig: Rig, gate: Gate) -> None:
    fingerprints = rig.fingerprints
    assert (fingerprints.generation, fingerprints.fingerprint, rig.published) == (0, "", [])
    for _ in range(5):
        fingerprints.look()
    assert gate.arrived.wait(LONG_S)
    fingerprints.look()  # returns while the reading stands still
    assert fingerprints.fingerprint == ""
    gate.open.set()
    assert fingerprints.wait(LONG_S)
    assert rig.published == [(0, of(rig.tower))] == [(fingerprints.generation, fingerprints.fingerprint)]
    reads = gate.reads
    fingerprints.look()
    assert fingerprints.wait(LONG_S)
    assert gate.reads == reads


def test_more_goes_into_it(rig: Rig) -> None:
    seen: list[str] = []
    more = Fingerprints(rig.tower, lambda generation, fingerprint: seen.append(fingerprint), lambda one: f"with {one}")
    assert more.wait(LONG_S)
    assert seen == [f"with {of(rig.tower)}"]


def test_what_was_loaded_counts_where_nothing_is_left_to_see(rig: Rig) -> None:
    """As with vLLM's CPU kernels, which pack weights away."""
    found = []
    for value in (1.0, 2.0, 1.0):
        rig.model.load_weights([("visual.0", torch.full((8,), value))])
        rig.model.visual[0].data.fill_(0)
        assert rig.fingerprints.wait(LONG_S)
        found.append(rig.fingerprints.fingerprint)
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("is_said", [True, False])
def test_weights_that_change_while_they_are_read(rig: Rig, gate: Gate, is_said: bool) -> None:
    """Not published; read anew. The control: where nobody says so, the fingerprint is of weights that never were."""
    old = of(rig.tower)
    rig.fingerprints.look()
    assert gate.arrived.wait(LONG_S)
    rig.model.fill(1)
    new = of(rig.tower)
    if is_said:
        rig.fingerprints.mark_unknown()
    gate.open.set()
    assert rig.fingerprints.wait(LONG_S)
    if is_said:
        assert rig.published == [(1, ""), (1, new)]
    else:
        ((generation, mixed),) = rig.published
        assert generation == 0
        assert mixed not in (old, new)


def test_weights_that_change_at_the_very_end(rig: Rig) -> None:
    """When all is read, and the fingerprint is not said yet."""
    said: list[tuple[int, str]] = []

    def change(digest: str) -> str:
        if not said:
            fingerprints.mark_unknown()
        return digest

    fingerprints = Fingerprints(rig.tower, lambda *row: said.append(row), change)
    assert fingerprints.wait(LONG_S)
    assert said == [(1, ""), (1, of(rig.tower))]


@pytest.mark.parametrize("is_said", [True, False])
def test_doubt_makes_it_unknown_at_once(rig: Rig, gate: Gate, is_said: bool) -> None:
    gate.open.set()
    assert rig.fingerprints.wait(LONG_S)
    old = rig.fingerprints.fingerprint
    rig.model.fill(1)
    gate.open.clear()
    if is_said:
        rig.fingerprints.mark_unknown()
        assert (rig.fingerprints.generation, rig.fingerprints.fingerprint) == (1, "")
        assert rig.published[1:] == [(1, "")]
        rig.fingerprints.look()
        assert rig.fingerprints.fingerprint == ""
    gate.open.set()
    assert rig.fingerprints.wait(LONG_S)
    assert (rig.fingerprints.fingerprint == of(rig.tower)) == is_said
    assert (rig.fingerprints.fingerprint == old) != is_said


@pytest.mark.parametrize("is_guarded", [True, False])
def test_nothing_is_read_while_weights_are_loaded(rig: Rig, is_guarded: bool) -> None:
    if not is_guarded:
        rig.tower.guard = nullcontext

    def half_way() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(4):
            yield f"visual.{index}", torch.ones(8)
            if index == 1:
                assert rig.fingerprints.wait(0.0 if is_guarded else LONG_S) != is_guarded

    rig.model.load_weights(half_way())
    assert rig.fingerprints.wait(LONG_S)
    assert (rig.fingerprints.fingerprint == of(rig.tower)) == is_guarded
    assert rig.fingerprints.generation == (2 if is_guarded else 0)


def test_a_load_that_fails_is_a_change(rig: Rig) -> None:
    assert rig.fingerprints.wait(LONG_S)
    old = rig.fingerprints.fingerprint
    with pytest.raises(AttributeError):
        rig.model.load_weights([("visual.0", torch.ones(8)), ("visual.9", torch.ones(8))])
    assert rig.fingerprints.fingerprint == ""
    assert rig.fingerprints.wait(LONG_S)
    assert rig.fingerprints.fingerprint == of(rig.tower) != old


def test_a_change_waits_until_the_reader_has_let_go(rig: Rig, gate: Gate) -> None:
    begun, readers = threading.Event(), []

    def change() -> None:
        with rig.fingerprints.changing():
            readers.append(rig.fingerprints._thread)
            begun.set()

    rig.fingerprints.look()
    assert gate.arrived.wait(LONG_S)
    changing = threading.Thread(target=change)
    changing.start()
    while rig.fingerprints._may_read():
        time.sleep(0.001)
    assert not begun.wait(0.05)
    gate.open.set()
    changing.join(LONG_S)
    assert readers == [None]
    assert rig.fingerprints.wait(LONG_S)
    assert rig.published == [(1, ""), (2, ""), (2, of(rig.tower))]


def test_changes_within_changes(rig: Rig) -> None:
    with rig.fingerprints.changing():
        rig.model.load_weights([("visual.0", torch.ones(8))])
        assert not rig.fingerprints.wait(0.0)
        assert rig.fingerprints._thread is None
    assert rig.fingerprints.wait(LONG_S)
    assert rig.fingerprints.fingerprint == of(rig.tower)


def test_nobody_waits_within_a_change(rig: Rig) -> None:
    """vLLM's calls lie within each other: what the inner one waits for at its end begins when the outer one ends."""
    waiting = threading.Thread(target=rig.fingerprints.wait, args=(3600.0,), daemon=True)
    with rig.fingerprints.changing():
        with rig.fingerprints.changing():
            pass
        waiting.start()
        waiting.join(LONG_S)
        assert not waiting.is_alive()
    assert rig.fingerprints.wait(LONG_S)
    assert rig.fingerprints.fingerprint == of(rig.tower)


@pytest.mark.parametrize("is_paused", [True, False])
def test_pause_while_it_is_read(rig: Rig, gate: Gate, is_paused: bool) -> None:
    """It returns when the reader has let go, and not before; nothing is read until resume."""
    rig.fingerprints.look()
    assert gate.arrived.wait(LONG_S)
    pausing = threading.Thread(target=rig.fingerprints.pause if is_paused else rig.fingerprints.look)
    pausing.start()
    if is_paused:
        while rig.fingerprints._may_read():
            time.sleep(0.001)
        assert pausing.is_alive()
    gate.open.set()
    pausing.join(LONG_S)
    assert not pausing.is_alive()
    if not is_paused:
        assert rig.fingerprints.wait(LONG_S)
        assert gate.reads == 8
        return
    assert gate.reads == 5  # the rest was left alone
    assert not rig.fingerprints.wait(0.0)
    assert (gate.reads, rig.published) == (5, [])
    rig.model.fill(1)  # what wakes up need not be what fell asleep
    rig.fingerprints.resume()
    rig.fingerprints.resume()
    assert rig.fingerprints.wait(LONG_S)
    assert rig.published == [(1, ""), (1, of(rig.tower))]


def test_changes_while_paused(rig: Rig) -> None:
    """Such as new weights for a model that sleeps."""
    rig.fingerprints.pause()
    rig.model.load_weights([("visual.0", torch.ones(8))])
    assert not rig.fingerprints.wait(0.0)
    rig.fingerprints.resume()
    assert rig.fingerprints.wait(LONG_S)


def test_an_error_leaves_it_unknown(
    rig: Rig, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate.open.set()

    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        gate.reads += 1
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "vllm.mmcache"):
        patch.setattr(rig.tower, "tensors", breaks)
        for _ in range(3):
            assert not rig.fingerprints.wait(LONG_S)
            rig.fingerprints.look()
        assert (gate.reads, rig.published) == (1, [])
        assert caplog.text.count("could not read the vision weights") == 1
        assert "the device is gone" in caplog.text
        rig.fingerprints.mark_unknown()
        assert not rig.fingerprints.wait(LONG_S)
        assert gate.reads == 2
    assert not rig.fingerprints.wait(LONG_S)  # that it would go now is no reason: nothing says so
    rig.fingerprints.mark_unknown()
    assert rig.fingerprints.wait(LONG_S)
    assert rig.published == [(1, ""), (2, ""), (2, of(rig.tower))]


def test_a_listener_that_raises_stops_nothing(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def listen(generation: int, fingerprint: str) -> None:
        raise OSError("nobody hears")

    fingerprints = Fingerprints(rig.tower, listen)
    assert fingerprints.wait(LONG_S)
    fingerprints.mark_unknown()
    assert fingerprints.wait(LONG_S)
    fingerprints.pause()  # the reader has let go
    assert caplog.text.count("nobody hears") >= 3


def test_closing_while_it_is_read(rig: Rig, gate: Gate) -> None:
    rig.fingerprints.look()
    assert gate.arrived.wait(LONG_S)
    closing = threading.Thread(target=rig.fingerprints.close)
    closing.start()
    while rig.fingerprints._may_read():
        time.sleep(0.001)
    gate.open.set()
    closing.join(LONG_S)
    assert not closing.is_alive()
    assert not rig.fingerprints.wait(LONG_S)  # at once
    assert (gate.reads, rig.published) == (5, [])


@pytest.mark.parametrize("is_said", [True, False])
def test_at_random(rig: Rig, is_said: bool) -> None:
    """Whatever is published is of the weights of its generation, as one value says which they are."""
    drawn, truth = random.Random(0), {0: of(rig.tower)}
    around: Callable[[], AbstractContextManager[None]] = rig.fingerprints.changing if is_said else nullcontext
    for value in range(1, 300):
        step = drawn.randrange(5)
        if step == 0:
            with around():
                rig.model.fill(value)
                time.sleep(0)
        elif step == 1:
            rig.fingerprints.pause()
            rig.model.fill(value)
            (rig.fingerprints.resume if drawn.random() < 0.9 else rig.fingerprints.look)()
        elif step == 2:
            rig.fingerprints.mark_unknown()
        elif step == 3:
            rig.fingerprints.look()
        else:  # mostly until it is known, so that enough are published, however slow the reader is
            soon = drawn.random() < 0.3 or not rig.fingerprints._may_read()
            rig.fingerprints.wait(0.001 * drawn.random() if soon else LONG_S)
        truth.setdefault(rig.fingerprints.generation, of(rig.tower))
    rig.fingerprints.resume()
    truth.setdefault(rig.fingerprints.generation, of(rig.tower))
    assert rig.fingerprints.wait(LONG_S)
    known = [(generation, fingerprint) for generation, fingerprint in rig.published if fingerprint]
    assert len(known) > 20
    right = all(truth[generation] == fingerprint for generation, fingerprint in known)
    assert right == is_said
    assert sorted(generation for generation, _ in rig.published) == [generation for generation, _ in rig.published]
