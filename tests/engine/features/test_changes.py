# SPDX-License-Identifier: Apache-2.0
"""What happens between the engine's look at an image and the rank's: other weights, a sleep, other pixels.

The engine says whose weights' features it means. A rank that has others runs its tower, and keeps nothing.
"""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from mmcache_tools.harness.oracle import Oracle
from mmcache_tools.zoo import build_cached

from tests.engine.features.test_tower_runs import reload_weights
from tests.support.store_server import Put
from tests.support.towers import Runs, ask_about, ask_named, features_by_image, forget_outputs, side
from vllm_mmcache.components.features.engine import vllm_connector
from vllm_mmcache.components.features.worker import hooks as worker_hooks
from vllm_mmcache.components.features.worker.rank import RankFeatures
from vllm_mmcache.content.digests import inputs_digest
from vllm_mmcache.exactness.answers import Inexact

pytestmark = pytest.mark.engine

QWEN = [pytest.param(EngineConfig("qwen3-vl"), id="qwen3-vl")]


@pytest.fixture
def in_between(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Has something done once, after the engine has said what lies in the arena and before a rank looks there."""
    build = vllm_connector.Connector.build_connector_meta

    def do(change: Callable[[], None]) -> None:
        def built(connector: Any, scheduler_output: Any) -> Any:
            message = build(connector, scheduler_output)
            if message is not None:
                monkeypatch.setattr(vllm_connector.Connector, "build_connector_meta", build)
                change()
            return message

        monkeypatch.setattr(vllm_connector.Connector, "build_connector_meta", built)

    return do


@pytest.fixture
def other(pool: EnginePool) -> Iterator[Path]:
    """A model with other weights; afterwards the engine has its own again."""
    yield build_cached("qwen3-vl", pool.zoo_root, seed=1)
    assert pool.rig is not None
    reload_weights(pool.rig, pool.rig.directory)


def load(rig: ZooRig, directory: Path) -> None:
    """Other weights in place, while a request is on its way."""
    rig.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})


@pytest.mark.any_engine
@pytest.mark.parametrize("looks", [True, False], ids=["looks", "control"])
@pytest.mark.parametrize("config", QWEN)
def test_weights_that_change_before_a_rank_takes_features(
    pool: EnginePool,
    config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
    in_between: Callable[[Callable[[], None]], None],
    other: Path,
    looks: bool,
) -> None:
    """The control: a rank that does not compare takes the old ones, and the answer is of no model."""
    rig, runs = pool.get(config), Runs()
    old = ask_about(rig, 660)
    rig.forget_all_but_features()
    assert runs.new() == 1
    if not looks:
        monkeypatch.setattr(RankFeatures, "_known_generation", lambda side: 1 + side.weights.generation - changed())
        before = side(rig).weights.generation

        def changed() -> int:
            return int(side(rig).weights.generation - before)

    in_between(lambda: load(rig, other))
    new = ask_about(rig, 660)
    if not looks:
        assert runs.new() == 0
        with pytest.raises(Inexact):
            rig.assert_exact(new, Oracle(other))
        return
    assert runs.new() == 1
    rig.assert_exact(new, Oracle(other))
    reload_weights(rig, rig.directory)
    old += ask_about(rig, 660)
    assert runs.new() == 0
    rig.assert_exact(old)


@pytest.mark.any_engine
@pytest.mark.parametrize("config", QWEN)
def test_weights_that_change_before_a_rank_gives_features(
    pool: EnginePool, config: EngineConfig, in_between: Callable[[Callable[[], None]], None], other: Path
) -> None:
    """What the new weights made is kept under no name; the old ones make their own. `old` is the control."""
    rig, runs = pool.get(config), Runs()
    in_between(lambda: load(rig, other))
    new = ask_about(rig, 661)
    assert not features_by_image(rig)
    rig.assert_exact(new, Oracle(other))
    reload_weights(rig, rig.directory)
    runs.new()
    old = ask_about(rig, 661)
    assert runs.new() == 1
    assert len(features_by_image(rig)) == 1
    rig.assert_exact(old)


@pytest.mark.any_engine
@pytest.mark.parametrize("config", QWEN)
def test_weights_that_are_set_to_zero(pool: EnginePool, config: EngineConfig, other: Path) -> None:
    """vLLM's weight checker does it. What the tower gives then is not found once the weights are there again."""
    rig, runs = pool.get(config), Runs()
    rig.llm.collective_rpc("reset_weights")
    ask_about(rig, 662)
    assert runs.new() == 1
    reload_weights(rig, rig.directory)
    again = ask_about(rig, 662)
    assert runs.new() == 1
    rig.assert_exact(again)


@pytest.mark.any_engine
@pytest.mark.parametrize("config", QWEN)
def test_sleep(pool: EnginePool, config: EngineConfig) -> None:
    """vLLM's own sleep needs a GPU. Asleep, nobody reads the weights; awake, they are known anew.

    The control: awake, what asks for a fingerprint gets one.
    """
    rig, runs = pool.get(config), Runs()
    worker = rig.llm.llm_engine.model_executor.driver_worker.worker
    weights = side(rig).weights
    answers = ask_about(rig, 662)
    assert runs.new() == 1

    asleep: list[bool] = []
    worker_hooks.pause_on_sleep(lambda level: asleep.append(weights.wait(0)), worker, (1,), {})
    assert asleep == [True], "what was known is known"
    weights.mark_unknown()
    assert not weights.wait(0.5)
    worker_hooks.resume_on_wake_up(lambda tags: None, worker, (), {"tags": ["kv_cache"]})
    assert not weights.wait(0.5)
    worker_hooks.resume_on_wake_up(lambda tags: None, worker, (["weights"],), {})
    assert weights.wait(60)
    rig.forget_all_but_features()
    answers += ask_about(rig, 662)
    assert runs.new() == 0
    rig.assert_exact(answers)

    weights.mark_unknown()
    assert weights.wait(60)


@pytest.mark.any_engine
@pytest.mark.parametrize("config", QWEN)
def test_weights_that_change_while_asleep(pool: EnginePool, config: EngineConfig) -> None:
    """Each round is the other's control: what was changed back is known again."""
    rig, runs = pool.get(config), Runs()
    worker = rig.llm.llm_engine.model_executor.driver_worker.worker
    ask_about(rig, 663)
    weight = next(tensor for _, tensor in side(rig).tower.tensors() if tensor.numel())
    before = weight.clone()

    def put(altered: torch.Tensor) -> Callable[[], None]:
        def change(tags: list[str] | None = None) -> None:
            with torch.inference_mode():
                weight.copy_(altered)

        return change

    try:
        for altered, expected in ((before * 2, 1), (before, 0)):
            worker_hooks.pause_on_sleep(lambda: None, worker, (), {})
            worker_hooks.resume_on_wake_up(put(altered), worker, (), {})
            forget_outputs(rig)
            assert rig.features.wait_until_known(60), "nobody has to ask for it"
            runs.new()
            ask_about(rig, 663)
            assert runs.new() == expected
    finally:
        put(before)()
        rig.forget_all_but_features()


@pytest.mark.any_engine
@pytest.mark.parametrize("is_on", [True, False], ids=["identity", "pixels"])
@pytest.mark.parametrize("config", QWEN)
def test_who_looks_at_pixels(
    pool: EnginePool, config: EngineConfig, put: Put, monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    """With identity nobody does, since the name binds them; without it a thread of the engine, not its step."""
    looked_in: list[str] = []
    digest = inputs_digest

    def seen(inputs: Any) -> str:
        looked_in.append(threading.current_thread().name)
        return digest(inputs)

    put(identity=is_on)
    rig, runs = pool.get(config), Runs()
    monkeypatch.setattr(vllm_connector, "inputs_digest", seen)
    answers = []
    for number, expected in ((664, 1), (664, 0), (665, 1)):
        answers.append(ask_named(rig, number, "a"))
        assert runs.new() == expected
        rig.forget_all_but_features()  # without identity vLLM's own caches trust the name
    if is_on:
        assert not looked_in
    else:
        assert looked_in
        assert all(name.startswith("mmcache-digest-") for name in looked_in)
    rig.assert_exact(answers)
