# SPDX-License-Identifier: Apache-2.0
"""A store that is refused at start, or switched off later, leaves no thread, no memory and no connector behind.

In the engine by hooks.close_store, in a rank by opening.close_on_rank.
"""

import gc
import logging
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.ec_connector import ECConnector

from tests.support.packages import SHAPE, features
from tests.support.tiers import LONG_S
from tests.unit.components.features.engine.test_transfers import CPU, FACTS, Engine, open_files
from tests.unit.components.features.engine.test_vllm_connector import Beside, Config, Maker, goes_on, lacking, step
from tests.unit.components.features.worker.test_weights import Model
from vllm_mmcache.base import status
from vllm_mmcache.base.errors import StoreUnusable
from vllm_mmcache.base.status import ON, State
from vllm_mmcache.components.features.engine import hooks
from vllm_mmcache.components.features.engine.ram_tier import ALIGN_BYTES
from vllm_mmcache.components.features.message import Message
from vllm_mmcache.components.features.worker import opening
from vllm_mmcache.components.features.worker.opening import RANK_FEATURES, close_on_rank
from vllm_mmcache.components.features.worker.rank import RankFeatures
from vllm_mmcache.components.features.worker.tower import Tower
from vllm_mmcache.components.features.worker.vllm_connector import Connector as RankConnector
from vllm_mmcache.components.features.worker.vllm_probe import FeatureFormat, Unsupported
from vllm_mmcache.lifecycle import rank_sync

MADE = {"image": "small", "video": ""}
TOLD = [{"row": 0, **FACTS}, {"row": 1, **FACTS}]


@pytest.fixture
def before() -> set[int]:
    """Memory of earlier tests that may still be there."""
    gc.collect()
    return open_files()


def threads() -> list[str]:
    """Of a store, in this process."""
    names = ("copies", "weights", "board", "digest", "pixels", "read-", "write-")
    return [
        one.name for one in threading.enumerate() if one.name.startswith(tuple(f"mmcache-{name}" for name in names))
    ]


def all_ended() -> bool:
    for one in threading.enumerate():
        if one.name in threads():
            one.join(10)
    return not threads()


@pytest.fixture
def nothing_runs() -> None:
    assert all_ended(), threads()


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("state", ["prepared", "opened"])
def test_a_store_without_a_scheduler(before: set[int], state: str) -> None:
    config = Config()
    hooks.prepare(config)
    if state == "opened":
        hooks.open_store(config, TOLD)
    assert open_files() - before  # the control
    for _ in range(2):
        hooks.close_store(config)
        assert not open_files() - before
        assert not any(id(config) in table for table in (hooks._prepared, hooks._opened, hooks._connectors))
    assert all_ended()


def test_a_store_that_can_t_be_opened_for_another_reason(before: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a URL that is wrong: the ranks told the same of themselves."""

    def fails(*args: Any) -> Any:
        raise StoreUnusable("no such store, says a test")

    monkeypatch.setattr(hooks, "open_tiers", fails)
    config = Config()
    hooks.prepare(config)
    with pytest.raises(StoreUnusable, match="says a test"):
        hooks.open_store(config, TOLD)
    assert not open_files() - before


@pytest.mark.usefixtures("nothing_runs")
def test_a_store_that_serves(monkeypatch: pytest.MonkeyPatch, before: set[int]) -> None:
    """Requests that wait for it go on, nothing is kept or told any more; pixels are made as before."""
    monkeypatch.setitem(status._is_on, "features", True)
    monkeypatch.setattr(status, "_states", {})
    beside, maker, config = Beside(), Maker(monkeypatch), Config()
    beside.trusts_names = True
    hooks._connectors[id(config)] = beside.connector
    monkeypatch.setattr(beside.scheduler, "vllm_config", config, raising=False)
    beside.know()
    beside.keep(beside.arrives(0), 0)
    beside.store.ram.clear()
    beside.tier.reading.shut()
    waits, lacks = beside.arrives(0), lacking("a", 8)
    beside.connector.on_request_added(lacks)
    assert not beside.may_go_on(waits)
    assert hooks.connector_of(beside.scheduler) is beside.connector
    beside.arena.board["loads_done"] = beside.arena.board["saves_done"] = 1 << 40

    beside.tier.reading.open()
    hooks.close_store(config)
    del beside.arena
    assert hooks.connector_of(beside.scheduler) is None
    assert not open_files() - before
    assert beside.may_go_on(waits)
    assert beside.told(waits) is None
    new = beside.arrives(1)
    assert beside.may_go_on(new)
    assert beside.told(new) is None
    assert goes_on(beside, lacks)
    message = step(beside, lacks, 0, is_new=False)
    assert (message.generation, message.loads, message.saves) == (0, [], [])
    assert list(message.pixels) == ["image-8"]
    later = lacking("later", 16)
    beside.connector.on_request_added(later)
    assert goes_on(beside, later)
    assert len(maker.made) == 2
    beside.connector.shutdown()
    assert all_ended()


class Runner:
    """As much of a model runner V2 as is looked at."""

    def __init__(self) -> None:
        self.model = Model()
        self.tower = Tower(self.model)
        self.tower.watch(notes=True)
        self.device = CPU
        self.encoder_cache = SimpleNamespace(encoder_outputs={}, mm_features={})
        self.ec_connector = self.stock = object.__new__(ECConnector)

    def get_model(self) -> Model:
        return self.model


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(1, 64 * ALIGN_BYTES)
    yield made
    made.close()


@pytest.fixture
def worker(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose tower has passed its trial."""
    place = SimpleNamespace(encodes=True, row=0)
    monkeypatch.setattr(opening, "_tower_of", lambda worker: worker.model_runner.tower)
    monkeypatch.setattr(opening, "place_of", lambda config: place)
    monkeypatch.setattr(opening, "probe", lambda *args: FeatureFormat(SHAPE.width, "sample"))
    monkeypatch.setattr(opening, "facts_of", lambda *args: FACTS)
    monkeypatch.setattr(opening, "_inputs", lambda config, model: {"image": SimpleNamespace(digest=lambda: "small")})
    monkeypatch.setattr(opening, "guard_positions", lambda *args: None)
    made = SimpleNamespace(vllm_config=SimpleNamespace(model_config=None), model_runner=Runner(), rank=0)
    assert opening.look_at(made) == MADE
    return made


@pytest.mark.usefixtures("nothing_runs")
def test_a_rank_that_has_not_served(engine: Engine, worker: Any) -> None:
    runner = worker.model_runner
    assert opening.open_on_rank(worker, engine.arena.address, ["image"])["row"] == 0
    assert isinstance(runner.ec_connector, RankConnector)
    assert engine.ranks.generation() == 1
    inodes = open_files()
    for _ in range(2):
        close_on_rank(worker)
        assert runner.ec_connector is runner.stock
        assert getattr(runner, RANK_FEATURES, None) is None
        assert engine.ranks.generation() == 0
        assert all_ended()
    engine.close()  # which has the same memory
    engine.ranks.close()
    assert open_files() < inodes


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("late", ["the weights", "what makes pixels"])
def test_a_rank_that_fails_half_way(engine: Engine, worker: Any, late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its memory was opened; the control is the test above."""

    def fails(*args: Any) -> Any:
        raise RuntimeError("not on this rank, says a test")

    if late == "the weights":
        monkeypatch.setattr(RankFeatures, "know_weights", fails)
    else:
        monkeypatch.setattr(opening, "PixelMaker", fails)
    assert opening.open_on_rank(worker, engine.arena.address, ["image"]) == {}
    assert worker.model_runner.ec_connector is worker.model_runner.stock
    assert getattr(worker.model_runner, RANK_FEATURES, None) is None
    assert all_ended()


@pytest.mark.usefixtures("nothing_runs")
def test_a_rank_that_serves(engine: Engine, worker: Any) -> None:
    """Nothing is taken or kept any more, and rows of images that come without their pixels are looked at as before."""
    opening.open_on_rank(worker, engine.arena.address, ["image"])
    rank = getattr(worker.model_runner, RANK_FEATURES)
    given = torch.zeros(SHAPE.num_tokens, SHAPE.width, dtype=torch.bfloat16)
    kept = []
    for number in (1, 2):
        message = Message(engine.ranks.generation() or 1, saves=[engine.save(number)[0]])
        message.rows["image-3"] = SHAPE.num_tokens
        outputs: dict[str, torch.Tensor] = {}
        with rank.encoding(message, outputs):
            outputs |= {f"image-{number}": given, "image-3": given[:-1] if number == 2 else given}
            rank.ran(lambda: 0.1)
        assert len(outputs["image-3"]) == SHAPE.num_tokens
        if number == 1:
            assert engine.copying.wait(LONG_S)
            kept.append(engine.kept(1))
            close_on_rank(worker)
    assert kept == [bytes(given.view(torch.uint8).numpy().tobytes())] != [features(1)]
    engine.copying.close()
    assert engine.kept(2) is None
    assert isinstance(worker.model_runner.ec_connector, RankConnector)
    assert all_ended()


class TwoRanks:
    """An executor: this process is rank 0, and the answers of rank 1 are given."""

    def __init__(self, worker: Any, *answers: tuple[State, Any]) -> None:
        for role in ("engine", "worker"):
            status.begin(role)
            status.put(role, "features", ON)
        self.worker = worker
        self.answers = iter(answers)
        self.opened: list[bool] = []

    def collective_rpc(self, question: Any) -> list[Any]:
        answer = question(self.worker)
        self.opened.append(isinstance(self.worker.model_runner.ec_connector, RankConnector))
        state, features = next(self.answers)
        return [answer, (1, {**rank_sync.as_plain_data({"features": state}), "features": features})]


OFF = State("off", "a reason")
TOLD_OFF = State("off", "a reason (worker 1)")


@pytest.mark.usefixtures("no_role", "nothing_runs")
def test_what_the_ranks_agree_on_closes_it_in_each(before: set[int], engine: Engine, worker: Any) -> None:
    """Rank 0 has opened its store, and rank 1 could not."""
    executor, config = TwoRanks(worker, (ON, MADE), (OFF, {}), (OFF, {})), Config()
    rank_sync.synchronize(executor, config)
    assert executor.opened == [False, True, False]
    assert status.of("worker")["features"] == TOLD_OFF == status.of("engine")["features"]
    assert worker.model_runner.ec_connector is worker.model_runner.stock
    assert not any(id(config) in table for table in (hooks._prepared, hooks._opened, hooks._connectors))
    assert all_ended()
    engine.close()
    engine.ranks.close()
    assert not open_files() - before


@pytest.mark.usefixtures("no_role", "nothing_runs")
@pytest.mark.parametrize(
    ("answers", "said", "tried"),
    [
        ([(OFF, {}), (OFF, {}), (OFF, {})], TOLD_OFF.reason, []),
        ([(ON, MADE | {"image": "others"})] + [(ON, {})] * 2 + [(OFF, {})], "would be tried with is not the same", []),
        ([(ON, MADE), (ON, {"row": 1, **FACTS}), (ON, {}), (OFF, {})], "what the vision tower makes", ["image"]),
        ([(ON, MADE | {"video": "clip"}), (ON, {"row": 1, **FACTS})] + [(OFF, {})] * 2, "tower makes", ["image"]),
    ],
    ids=["one can't make it", "they have made other images", "alike", "one can't make videos"],
)
def test_towers_are_tried_only_with_what_all_ranks_have(
    worker: Any, answers: list[Any], said: str, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their ranks would wait for each other for ever. The control is where they are alike.

    The store is refused there, too, because of what rank 1 says of its features.
    """
    runs: list[str] = []

    def probe(*args: Any) -> FeatureFormat:
        (modality,) = [name for name, one in made.items() if one is args[4]]
        runs.append(modality)
        return FeatureFormat(SHAPE.width, "sample")

    made = {name: SimpleNamespace(digest=lambda name=name: MADE[name] or "a clip") for name in MADE}
    monkeypatch.setattr(worker.model_runner, opening._TRIAL, made)
    monkeypatch.setattr(opening, "probe", probe)
    config = Config()
    rank_sync.synchronize(TwoRanks(worker, *answers), config)
    assert said in status.of("engine")["features"].reason
    assert runs == tried
    assert not hasattr(worker.model_runner, opening._TRIAL)
    assert all_ended()


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("why", ["its features", "its memory"])
def test_a_rank_that_refuses_has_run_the_tower_as_often_as_others(
    engine: Engine, worker: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for it in the next run for ever, as here those of videos."""
    runs: list[str] = []

    def probe(config: Any, model: Any, tower: Any, device: Any, inputs: Any) -> FeatureFormat:
        runs.append(inputs.modality)
        if why == "its features" and inputs.modality == "image":
            raise Unsupported("it is unlike the others, says a test")
        return FeatureFormat(SHAPE.width, "sample")

    def no_memory(*args: Any) -> Any:
        raise Unsupported("no memory is shared, says a test")

    inputs = {name: SimpleNamespace(modality=name) for name in ("image", "video")}
    monkeypatch.setattr(worker.model_runner, opening._TRIAL, inputs)
    monkeypatch.setattr(opening, "probe", probe)
    if why == "its memory":
        monkeypatch.setattr(opening, "_rank_features", no_memory)
    assert opening.open_on_rank(worker, engine.arena.address, ["image", "video"]) == {}
    assert runs == ["image", "video"]
    assert all_ended()


def test_what_can_t_be_made_is_said_before_the_tower_runs(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """An image that can't keeps all off, a video that can't keeps videos off."""
    log.set_level(logging.INFO, "vllm.mmcache")
    failing: set[str] = set()

    def fails(config: Any, model: Any, modality: str) -> Any:
        if modality in failing:
            raise OSError(f"no {modality}, says a test")
        return modality

    monkeypatch.setattr(opening, "takes", lambda config, modality: True)
    monkeypatch.setattr(opening, "trial_inputs", fails)
    assert list(opening._inputs(None, Model())) == ["image", "video"]
    failing.add("video")
    assert list(opening._inputs(None, Model())) == ["image"]
    assert "no video, says a test" in log.text
    failing.add("image")
    with pytest.raises(Unsupported, match=r"Model could not be tried with two images: no image, says a test"):
        opening._inputs(None, Model())
