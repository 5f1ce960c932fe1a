# SPDX-License-Identifier: Apache-2.0
"""Requests whose features are on their way: they are held back, others go on, and nothing waits for ever.

What a tier does slowly it does here until the test lets it go on, so no test is about how fast anything is.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig

from tests.support.redis_faults import server_that
from tests.support.store_server import TIMEOUT_S, Put, Server
from tests.support.tiers import LONG_S, within
from tests.support.towers import Asked, Runs, ask_about, forget_outputs, question, side, slots
from vllm_mmcache.components.features.engine import store
from vllm_mmcache.exactness.conversations import filler, user
from vllm_mmcache.storage import tier as tier_module

pytestmark = pytest.mark.engine

QWEN = EngineConfig("qwen3-vl")
STEPS = 5  # in which a request that may go on has begun


class Gate:
    """Where a thread waits until the test opens it."""

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self.num_waiting = 0

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, behind the gate."""

        def wait_and_go_on(*args: Any, **kwargs: Any) -> Any:
            self.num_waiting += 1
            self._is_open.wait()
            return function(*args, **kwargs)

        return wait_and_go_on

    def wait(self) -> None:
        self._is_open.wait()

    def open(self) -> None:
        self._is_open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Open when the test ends, so that no thread stays behind."""
    made = Gate()
    yield made
    made.open()


def on_disk(rig: ZooRig, *numbers: int) -> None:
    """Have features of these pictures in the store's directory, and nowhere else."""
    ask_about(rig, *numbers)
    assert rig.features.flush(LONG_S)
    rig.make_cold()
    assert not slots(rig)


def text(number: int) -> dict[str, Any]:
    return user(f"Number {number}." + filler(20, number))


@pytest.mark.any_engine
@pytest.mark.parametrize("is_slow", [True, False], ids=["slow", "control"])
def test_others_go_on(
    alone: EnginePool, put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate, is_slow: bool
) -> None:
    """Text that came later is answered while an image loads. The control: what loads at once is answered first."""
    put(store=str(tmp_path), store_wait_s=60)
    monkeypatch.setattr(store, "LONGEST_LOAD_S", 600)
    rig, runs = alone.get(QWEN), Runs()
    on_disk(rig, 620, 621)
    assert runs.new() == 2
    if is_slow:
        (tier,) = rig.features.store.below
        monkeypatch.setattr(tier, "load", gate.before(tier.load))
    num_tokens = 16 if is_slow else 200  # beside the control's there is time enough to answer
    with Asked(rig) as asked:
        asked.ask(text(0), max_tokens=num_tokens)
        asked.step(3)
        asked.ask(question(620))  # while another one is running
        asked.ask(text(1), max_tokens=num_tokens)
        if is_slow:
            asked.until(2)
            asked.ask(question(621))  # and while none is
            asked.step(STEPS)
            asked.ask(text(2))
            asked.until(3)
            assert not any(answer.images for answer in asked.answers)
            assert asked.num_running() == 0
            gate.open()
            asked.until(5)
        else:
            assert rig.features.store.wait([*rig.features.store._fetches.values()], LONG_S)
            assert asked.until(1)[0].images
            asked.until(3)
    assert runs.new() == 0
    rig.assert_exact(asked.answers)


@pytest.mark.any_engine
@pytest.mark.parametrize("waits", [True, False], ids=["waits", "control"])
def test_an_image_that_comes_again_while_it_is_saved(alone: EnginePool, put: Put, gate: Gate, waits: bool) -> None:
    """It waits for the copy of what the tower gave. The control: without patience the tower runs twice."""
    put(store_wait_s=10 if waits else 0)
    rig, runs = alone.get(QWEN), Runs()
    side(rig).copies.then(gate.wait)  # what is to be saved is copied behind it
    with Asked(rig) as asked:
        asked.ask(question(622))
        asked.until(1)
        assert runs.new() == 1
        forget_outputs(rig)
        asked.ask(question(622))
        asked.step(STEPS)
        assert asked.num_running() == (0 if waits else 1)
        gate.open()
        asked.until(2)
    assert runs.new() == (0 if waits else 1)
    rig.assert_exact(asked.answers)


def hang(rig: ZooRig, monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    """From now on a load from disk comes back when the gate is open."""
    (tier,) = rig.features.store.below
    monkeypatch.setattr(tier.backend, "open", gate.before(tier.backend.open))
    monkeypatch.setattr(store, "LONGEST_LOAD_S", 600)


def is_known_to_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, as if the time of the loads that are under way had been over for long."""
    monkeypatch.setattr(store, "LONGEST_LOAD_S", 0)
    monkeypatch.setattr(tier_module, "HUNG_S", -1000)


@pytest.mark.any_engine
def test_a_tier_that_hangs(
    alone: EnginePool, put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    """It is waited for within the patience, once; then the tower runs, and nobody waits; and the engine can end."""
    put(store=str(tmp_path), store_wait_s=60)
    rig, runs = alone.get(QWEN), Runs()
    on_disk(rig, 623, 624, 625)
    answers = ask_about(rig, 623)  # the control: what does not hang is used
    assert runs.new() == 3
    rig.make_cold()
    monkeypatch.setattr(rig.features.store.costs, "_max_wait_s", 1.0)
    hang(rig, monkeypatch, gate)
    (tier,) = rig.features.store.below
    with Asked(rig) as asked:
        asked.ask(text(3), max_tokens=100)
        asked.step(3)
        asked.ask(question(623))
        asked.step()
        assert asked.num_running() == 1, "the image is waited for, and the text goes on"
        asked.until(2)
        assert runs.new() == 1
        assert within(LONG_S, lambda: gate.num_waiting == 1)
        assert not tier.is_open()
        is_known_to_hang(monkeypatch)
        assert tier.is_open()
        for number in (624, 625):
            asked.ask(question(number))
            asked.step(2)
            assert asked.num_running() == 1, "nobody waits any more"
            asked.until(len(asked.answers) + 1)
        answers += asked.answers
    assert runs.new() == 2
    assert gate.num_waiting == 1
    rig.assert_exact(answers)
    alone.close()
    assert [thread.name for thread in threading.enumerate() if "mmcache-read" in thread.name], "one still hangs"


@contextmanager
def silent_server() -> Iterator[str]:
    """The URL of a server that takes connections and says nothing, for ever."""
    ended = threading.Event()
    with server_that(lambda connection: ended.wait()) as url:
        yield url
        ended.set()


def test_a_server_that_never_answers(alone: EnginePool, put: Put) -> None:
    with silent_server() as url:
        put(store=url, store_remote_timeout_s=10, store_wait_s=1)
        rig, runs = alone.get(QWEN), Runs()
        with Asked(rig) as asked:
            asked.ask(text(4), max_tokens=100)
            asked.step(3)
            asked.ask(question(626))
            asked.step()
            assert asked.num_running() == 1
            asked.until(2)
        assert runs.new() == 1
        rig.assert_exact(asked.answers)
        alone.close()


def test_a_server_that_answers_late(
    alone: EnginePool, put: Put, server: Server, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    """What comes after its request has gone on is there for the next one."""
    put(store=server.url, store_remote_timeout_s=TIMEOUT_S, store_wait_s=1)
    monkeypatch.setattr(store, "LONGEST_LOAD_S", 600)
    rig, runs = alone.get(QWEN), Runs()
    on_disk(rig, 627)
    (tier,) = rig.features.store.below
    with monkeypatch.context() as patched:
        patched.setattr(tier, "load", gate.before(tier.load))
        patched.setattr(rig.features.store, "reserve", lambda *asked: None)  # what the tower gives is not kept
        answers = ask_about(rig, 627)
        assert runs.new() == 2
        gate.open()
        assert rig.features.store.wait([*rig.features.store._fetches.values()], LONG_S)
    rig.forget_all_but_features()
    answers += ask_about(rig, 627)
    assert runs.new() == 0
    rig.assert_exact(answers)


def test_a_save_that_a_late_miss_overtakes(
    alone: EnginePool, put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    """A load that finds nothing, after its request went on, does not end the wait for what the tower gave."""
    put(store=str(tmp_path), store_wait_s=1)
    rig, runs, load = alone.get(QWEN), Runs(), Gate()
    store = rig.features.store
    (tier,) = store.below
    monkeypatch.setattr(tier, "load", load.before(tier.load))
    side(rig).copies.then(gate.wait)
    with Asked(rig) as asked:
        asked.ask(question(628))
        asked.until(1)
        assert runs.new() == 1
        assert within(LONG_S, lambda: load.num_waiting == 1)
        load.open()
        assert within(LONG_S, lambda: not store._readers[tier.name]._until)
        monkeypatch.setattr(store.costs, "_max_wait_s", 10.0)
        forget_outputs(rig)
        asked.ask(question(628))
        asked.step(STEPS)
        assert asked.num_running() == 0
        gate.open()
        asked.until(2)
    assert runs.new() == 0
    rig.assert_exact(asked.answers)
