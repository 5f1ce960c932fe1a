# SPDX-License-Identifier: Apache-2.0
"""Features are loaded only where the KV of their image is not reused, in the order in which they are needed.

What was reused is what vLLM says of each answer; what was loaded is counted at the tiers.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.support.store_server import Put
from tests.support.tiers import LONG_S
from tests.support.towers import Asked, Runs, forget_outputs
from vllm_mmcache.components.features import tiers
from vllm_mmcache.components.features.engine import store
from vllm_mmcache.components.features.engine.vllm_connector import Connector
from vllm_mmcache.exactness.answers import Answer, Message
from vllm_mmcache.exactness.conversations import assistant, filler, picture, user

pytestmark = [pytest.mark.engine, pytest.mark.any_engine]

NUM_CONVERSATIONS, NUM_IMAGES = 8, 20
SIZE = (112, 112)
RAM_BYTES = 8 << 20
"""Less than the features of all conversations."""
MANY = EngineConfig("qwen3-vl", num_images=NUM_IMAGES)
# With full attention in every layer, with a sliding window, and with states of a recurrent layer.
FAMILIES = [pytest.param(EngineConfig(family), id=family) for family in ("qwen3-vl", "gemma3", "qwen3.5")]

Get = Callable[[EngineConfig], ZooRig]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the store, which all engines of this file have."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module", autouse=True)
def closed(pool: EnginePool) -> Iterator[None]:
    """No other test gets these engines."""
    pool.close()
    yield
    pool.close()


@pytest.fixture
def get(pool: EnginePool, put: Put, place: Path, monkeypatch: pytest.MonkeyPatch) -> Get:
    """Engines with a directory and little RAM, whose requests wait for what is loaded."""
    put(store=str(place), feature_ram_bytes=RAM_BYTES)

    def get_engine(config: EngineConfig) -> ZooRig:
        rig = pool.get(config)
        monkeypatch.setattr(rig.features.store.costs, "_max_wait_s", LONG_S)
        return rig

    return get_engine


class Loads:
    """The images whose features tiers are asked for, by vLLM's name, in the order of the loads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self._may_go_on = threading.Event()
        self._may_go_on.set()
        load = tiers.load

        def noted(tier: Any, identity: Any, *args: Any) -> bool:
            self.names.append(identity.identifier)
            assert self._may_go_on.wait(LONG_S)
            return load(tier, identity, *args)

        monkeypatch.setattr(store, "load", noted)

    def shut(self) -> None:
        """From now on loads wait, each in its thread."""
        self._may_go_on.clear()

    def open(self) -> None:
        self._may_go_on.set()

    def new(self) -> list[str]:
        found, self.names = self.names, []
        return found


class Read:
    """What was read from tiers, and evicted from RAM, since the last look."""

    def __init__(self, rig: ZooRig) -> None:
        self._rig = rig
        self._before = self._total()

    def new(self) -> tuple[float, float]:
        """Bytes read, and packages evicted."""
        before, self._before = self._before, self._total()
        return self._before[0] - before[0], self._before[1] - before[1]

    def _total(self) -> tuple[float, float]:
        counts = self._rig.features.store.counts()
        return counts["disk"]["read_bytes"], counts["ram"]["evictions"]


def screenshots(conversation: int, num_images: int = NUM_IMAGES) -> list[Message]:
    """A conversation about so many pictures, which no other one has."""
    parts = [(filler(3, n), picture(10_000 + 100 * conversation + n, SIZE)) for n in range(num_images)]
    return [user(*(part for pair in parts for part in pair), filler(60))]


def next_turn(talk: Sequence[Message], answer: Answer) -> list[Message]:
    return [*talk, assistant(answer.text), user("Go on.")]


def names_of(rig: ZooRig, talk: Sequence[Message]) -> list[str]:
    """vLLM's names of the images of a conversation."""
    with Asked(rig) as asked:
        ask(asked, talk)
        (request,) = rig.scheduler.requests.values()
        return [feature.identifier for feature in request.mm_features]


def ask(asked: Asked, talk: Sequence[Message]) -> None:
    asked.rig.enqueue(talk, 8)


def begun(rig: ZooRig, *talks: Sequence[Message]) -> list[list[Message]]:
    """Second turns of these conversations, whose first ones are answered, and their features in the directory."""
    turns = []
    for talk in talks:
        turns.append(next_turn(talk, rig.ask(talk)[0]))
        assert rig.features.flush(LONG_S)  # RAM holds less than all of them: the next would let go of what is unwritten
    return turns


@pytest.fixture
def rig(get: Get) -> ZooRig:
    """An engine with little RAM, which is empty."""
    return get(MANY)


@pytest.fixture
def turns(rig: ZooRig, request: pytest.FixtureRequest) -> list[list[Message]]:
    """Of conversations whose KV is cached, and whose features are in the directory alone."""
    found = begun(rig, *(screenshots(number) for number in range(getattr(request, "param", 2))))
    rig.forget_features()
    return found


def load_all_at_once(rig: ZooRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads know no bound, and each step of the engine waits until those that are begun are done."""
    monkeypatch.setattr(rig.features, "_most_begun_bytes", 1 << 40)
    step = rig.llm.llm_engine.step

    def after_loads() -> Any:
        deadline = time.monotonic() + LONG_S
        while any(one.fetch is not None and not one.fetch.is_done for one in list(rig.features._begun)):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return step()

    monkeypatch.setattr(rig.llm.llm_engine, "step", after_loads)


@pytest.mark.parametrize("turns", [NUM_CONVERSATIONS], indirect=True)
@pytest.mark.parametrize("looks", [True, False], ids=["looks", "control"])
def test_cached_conversations(
    rig: ZooRig, turns: list[list[Message]], monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    """Nothing is read. The control: an engine that does not look at the KV loads all, more than RAM holds."""
    runs, read = Runs(), Read(rig)
    if not looks:
        monkeypatch.setattr(Connector, "_num_cached_tokens", lambda self, request: 0)
        load_all_at_once(rig, monkeypatch)
    answers = rig.ask(*turns)
    assert all(answer.num_cached_tokens >= rig.image_spans(answer)[-1][1] for answer in answers)
    assert runs.new() == 0
    if looks:
        assert read.new() == (0, 0)
    else:
        assert all(amount > 0 for amount in read.new())
    rig.assert_exact(answers[:1])


@pytest.mark.parametrize("turns", [NUM_CONVERSATIONS], indirect=True)
@pytest.mark.parametrize("is_bounded", [True, False], ids=["bounded", "control"])
def test_conversations_whose_kv_is_gone(
    rig: ZooRig, turns: list[list[Message]], monkeypatch: pytest.MonkeyPatch, is_bounded: bool
) -> None:
    """All are loaded, each once. The control: without a bound loads for later let go of what comes first."""
    runs, loads = Runs(), Loads(monkeypatch)
    forget_outputs(rig)
    if not is_bounded:
        load_all_at_once(rig, monkeypatch)
    answers = rig.ask(*turns)
    assert not any(answer.num_cached_tokens for answer in answers)
    assert ((runs.new(), len(loads.new())) == (0, NUM_CONVERSATIONS * NUM_IMAGES)) == is_bounded
    rig.assert_exact(answers[:1])


@pytest.mark.parametrize("looks", [True, False], ids=["looks", "control"])
def test_what_is_needed_is_loaded_first(
    rig: ZooRig, turns: list[list[Message]], monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    """On a slow tier, behind conversations that need nothing. The control waits for what those do not need."""
    (cold,) = begun(rig, screenshots(50))
    expected = names_of(rig, cold)
    rig.scheduler.kv_cache_manager.block_pool.evict_blocks(blocks_behind(rig, cold, 0))
    forget_encoded(rig)
    rig.forget_features()
    loads = Loads(monkeypatch)
    if not looks:
        monkeypatch.setattr(Connector, "_num_cached_tokens", lambda self, request: 0)
    runs = Runs()
    with Asked(rig) as asked:
        loads.shut()
        for talk in [*turns, cold]:
            ask(asked, talk)
        loads.open()
        while rig.scheduler.requests:
            rig.llm.llm_engine.step()
    assert runs.new() == 0
    assert (loads.new()[:NUM_IMAGES] == expected) == looks


def test_half_of_the_images(rig: ZooRig, turns: list[list[Message]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies before the place where the hit ends is not loaded; the image that it ends in is."""
    talk, loads, runs = turns[0], Loads(monkeypatch), Runs()
    expected = names_of(rig, talk)
    position = position_in_image(rig, talk, NUM_IMAGES // 2)
    rig.scheduler.kv_cache_manager.block_pool.evict_blocks(blocks_behind(rig, talk, position))
    forget_encoded(rig)
    (answer,) = rig.ask(talk)
    spans = rig.image_spans(answer)
    needed = [number for number, (_, end) in enumerate(spans) if end > answer.num_cached_tokens]
    assert spans[needed[0]][0] < answer.num_cached_tokens, "the hit ends inside this one"
    assert 5 < len(needed) < NUM_IMAGES - 5
    assert loads.new() == expected[needed[0] :]
    assert runs.new() == 0
    rig.assert_exact([answer])


@pytest.mark.parametrize("begins", [True, False], ids=["begins", "control"])
def test_kv_that_goes_while_a_request_waits(
    rig: ZooRig, turns: list[list[Message]], monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    """Its images are loaded when it could be scheduled. The control: not then, and the tower runs."""
    loads, runs = Loads(monkeypatch), Runs()
    expected = names_of(rig, turns[0])
    with Asked(rig) as asked:
        ask(asked, turns[0])
        assert not loads.new()
        forget_outputs(rig)
        if not begins:
            monkeypatch.setattr(Connector, "_is_on_its_way", lambda *asked: False)
            monkeypatch.setattr(Connector, "_look_ahead", lambda *asked: None)
        while rig.scheduler.requests:
            rig.llm.llm_engine.step()
    assert loads.new() == (expected if begins else [])
    assert runs.new() == (0 if begins else NUM_IMAGES)


@pytest.mark.parametrize("config", FAMILIES)
def test_where_layers_keep_different_states(get: Get, monkeypatch: pytest.MonkeyPatch, config: EngineConfig) -> None:
    """An image is loaded where any layer lacks its state, though full attention has its KV. First: it has."""
    rig = get(config)
    (talk,) = begun(rig, screenshots(60, 3))
    loads, runs, names = Loads(monkeypatch), Runs(), names_of(rig, talk)
    for evicts in (False, True):
        rig.forget_features()
        forget_encoded(rig)
        if evicts:
            evict_sparse(rig)
        (answer,) = rig.ask(talk)
        needed = [
            name
            for name, (_, end) in zip(names, rig.image_spans(answer), strict=True)
            if end > answer.num_cached_tokens
        ]
        assert loads.new() == needed
        assert (len(needed) == 3) == (evicts and not rig.keeps_all_kv)
    assert runs.new() == 0
    rig.assert_exact([answer])


def forget_encoded(rig: ZooRig) -> None:
    """Empty vLLM's encoder cache, and leave the KV cache alone."""
    rig.scheduler.encoder_cache_manager.reset()
    cache = rig.runner.encoder_cache
    getattr(cache, "encoder_outputs", cache).clear()


def evict_sparse(rig: ZooRig) -> None:
    """All KV blocks but those of full attention."""
    manager = rig.scheduler.kv_cache_manager
    groups = manager.kv_cache_config.kv_cache_groups
    sparse = {n for n, group in enumerate(groups) if not isinstance(group.kv_cache_spec, FullAttentionSpec)}
    blocks: list[KVCacheBlock] = manager.block_pool.blocks
    found = {block.block_id for block in blocks if block.block_hash and get_group_id(block.block_hash) in sparse}
    manager.block_pool.evict_blocks(found)


def blocks_behind(rig: ZooRig, talk: Sequence[Message], position: int) -> set[int]:
    """The cached KV blocks of a conversation from that token on."""
    with Asked(rig) as asked:
        ask(asked, talk)
        (request,) = rig.scheduler.requests.values()
        manager = rig.scheduler.kv_cache_manager
        blocks, _, _ = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
    first = position // rig.block_tokens
    return {block.block_id for group in blocks for block in group[first:]}


def position_in_image(rig: ZooRig, talk: Sequence[Message], number: int) -> int:
    """A start of a block that lies inside this image or one after it."""
    with Asked(rig) as asked:
        ask(asked, talk)
        (request,) = rig.scheduler.requests.values()
        places = [feature.mm_position for feature in request.mm_features[number:]]
    for place in places:
        inside = (place.offset // rig.block_tokens + 1) * rig.block_tokens
        if inside < place.offset + place.length:
            return int(inside)
    raise AssertionError("no image with the start of a block inside")
