# SPDX-License-Identifier: Apache-2.0
"""The store beside a scheduler, without an engine: which requests are held back, for what, and what ranks are told."""

import gc
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from tests.support.packages import SHAPE, features
from tests.support.tiers import LONG_S, MemoryTier
from tests.unit.components.features.engine.test_transfers import FACTS, open_files
from vllm_mmcache.base import status
from vllm_mmcache.base.errors import StoreUnusable
from vllm_mmcache.base.worker_threads import Threads
from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.engine import hooks
from vllm_mmcache.components.features.engine.cost_model import CostModel
from vllm_mmcache.components.features.engine.ram_tier import ALIGN_BYTES, RamTier
from vllm_mmcache.components.features.engine.store import Store
from vllm_mmcache.components.features.engine.transfers import Ranks
from vllm_mmcache.components.features.engine.vllm_connector import Connector
from vllm_mmcache.components.features.message import Message

OFFSET = 10
"""Of an image in its prompt."""
PATIENCE_S = 1e6
BLOCK = 4
FULL = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
WINDOW = SlidingWindowSpec(BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=2 * BLOCK)


class Beside:
    """A connector over one tier that hangs as told, and the scheduler that it stands beside."""

    def __init__(self) -> None:
        self.arena = Arena.create(64 * ALIGN_BYTES, 1)
        self.tier = MemoryTier()
        self.ranks = Ranks(self.arena, [FACTS])
        self.store = Store(
            self.arena, RamTier(self.arena.num_bytes), [self.tier], CostModel(lambda n: None, PATIENCE_S)
        )
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=100),
            model_config=None,
            additional_config={},
            instance_id="test",
        )
        self.connector = Connector(config, self.arena, self.ranks, self.store)
        self.scheduler = Scheduler()
        self.connector.serve(self.scheduler)

    def know(self, generation: int = 1) -> None:
        """The rank's weights."""
        self.arena.board["fingerprint"] = b"a" * 64
        self.arena.board["generation"] = generation

    def arrives(self, number: int, **more: Any) -> Any:
        request = SimpleNamespace(
            request_id=f"request-{number}",
            mm_features=[image(number, **more)],
            sampling_params=None,
            block_hashes=[],
            skip_reading_prefix_cache=False,
            num_tokens=100,
        )
        self.connector.on_request_added(request)
        return request

    def may_go_on(self, request: Any, num_computed_tokens: int = 0) -> bool:
        return self.connector.ensure_cache_available(request, num_computed_tokens)

    def told(self, request: Any) -> Message | None:
        """What the ranks are told of a step that encodes the request's image."""
        self.connector.update_state_after_alloc(request, 0)
        found = self.connector.build_connector_meta(SimpleNamespace(scheduled_new_reqs=[]))
        assert found is None or isinstance(found, Message)
        return found

    def has_looked(self, request: Any) -> bool:
        """Wait until what was begun for the request is done."""
        wanted = self.named(request)
        while wanted.fetch is None:
            time.sleep(0.001)
        return self.store.wait([wanted.fetch], LONG_S)

    def named(self, request: Any) -> Any:
        """Wait until it is known what the request's image shows."""
        (wanted,) = self.connector._requests[request.request_id]
        while not wanted.identifier:
            time.sleep(0.001)
        return wanted

    def keep(self, request: Any, number: int) -> None:
        """As the rank does it."""
        assert self.has_looked(request)
        message = self.told(request)
        assert message is not None
        (place,) = message.saves
        self.arena.buffer(place.offset, SHAPE.num_bytes)[:] = features(number)
        self.arena.buffer(place.offset + SHAPE.num_bytes, 8)[:] = place.number.to_bytes(8, "little")
        self.arena.board["saves_done"] = place.number
        assert self.connector.flush(LONG_S)


class Scheduler:
    """As much of vLLM's as is looked at."""

    def __init__(self) -> None:
        self.ec_connector: Any = None
        self.running = ["another request"]
        self.requests: dict[str, Any] = {}
        self.kv_cache_manager = empty_cache()


def empty_cache() -> KVCacheManager:
    """vLLM's own, of a model with full attention and a sliding window."""
    groups = [KVCacheGroupSpec([type(spec).__name__], spec) for spec in (FULL, WINDOW)]
    config = KVCacheConfig(num_blocks=400, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(config, max_model_len=1024, scheduler_block_size=BLOCK, hash_block_size=BLOCK)


def image(number: int, modality: str = "image", name: str = "pixel_values", data: bool = True) -> MultiModalFeatureSpec:
    """An image of that number, which stands for as many tokens as SHAPE says."""
    pixels = MultiModalFieldElem(data=torch.full((4,), float(number)), field=MultiModalBatchedField())
    return MultiModalFeatureSpec(
        data=MultiModalKwargsItem({name: pixels}) if data else None,
        modality=modality,
        identifier=f"image-{number}",
        mm_position=PlaceholderRange(offset=OFFSET, length=SHAPE.num_tokens),
    )


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Beside]:
    monkeypatch.setitem(status._is_on, "features", True)
    made = Beside()
    yield made
    made.tier.reading.open()
    made.tier.writing.open()
    for field in ("loads_done", "saves_done"):  # as ranks that have ended their copies, which shutdown waits for
        made.arena.board[field] = 1 << 40
    made.connector.shutdown()


def test_a_request_is_held_back_while_its_features_come(beside: Beside) -> None:
    """And then the ranks load them; the control: what no tier has is saved."""
    beside.know()
    beside.keep(beside.arrives(0), 0)
    beside.store.ram.clear()
    beside.tier.reading.shut()
    request = beside.arrives(0)
    assert not beside.may_go_on(request)
    assert beside.may_go_on(request, OFFSET + SHAPE.num_tokens)  # its tokens are cached anyway
    request = beside.arrives(0)
    assert not beside.may_go_on(request)
    beside.tier.reading.open()
    assert beside.has_looked(request)
    assert beside.may_go_on(request)
    message = beside.told(request)
    assert message is not None
    assert ([place.mm_hash for place in message.loads], message.saves) == (["image-0"], [])
    other = beside.arrives(1)
    assert beside.has_looked(other)
    assert beside.may_go_on(other)
    message = beside.told(other)
    assert message is not None
    assert (message.loads, [place.mm_hash for place in message.saves]) == ([], ["image-1"])


def test_an_image_that_does_not_come_next_holds_nobody_back(beside: Beside) -> None:
    beside.know()
    beside.tier.reading.shut()
    request = beside.arrives(0)
    beside.connector._reach = OFFSET
    assert beside.may_go_on(request)
    assert not beside.may_go_on(request, 1)


def test_while_weights_are_not_known_nobody_is_held_back(beside: Beside) -> None:
    """Nothing is used of what might come; the control: they become known before the request is scheduled."""
    beside.tier.reading.shut()
    for known in (False, True):
        request = beside.arrives(int(known))
        beside.named(request)
        if known:
            beside.know()
        assert beside.may_go_on(request) != known
        assert (beside.told(request) is not None) == known


def test_where_nobody_can_find_out_what_an_image_is_nobody_waits(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the same request, when somebody can but has not yet."""
    beside.know()
    submit: Callable[..., bool]
    for submit in (lambda self, job: False, lambda self, job: True):
        monkeypatch.setattr(Threads, "submit", submit)
        assert beside.may_go_on(beside.arrives(0)) != submit(None, None)


@pytest.mark.parametrize(
    "more", [{"modality": "audio"}, {"name": "image_embeds"}, {"data": False}], ids=["audio", "embeddings", "no pixels"]
)
def test_what_is_left_alone(beside: Beside, more: dict[str, Any]) -> None:
    """What is no image, ready-made embeddings, and an image of which only a name is there that says nothing."""
    beside.know()
    request = beside.arrives(0, **more)
    assert beside.may_go_on(request)
    assert beside.told(request) is None


def test_a_name_alone_is_not_trusted(beside: Beside) -> None:
    """Another picture under the same name is another image."""
    beside.know()
    beside.keep(beside.arrives(0), 0)
    again, other = beside.arrives(0), beside.arrives(1)
    other.mm_features[0].identifier = "image-0"
    other = SimpleNamespace(**vars(other) | {"request_id": "other"})
    beside.connector.on_request_added(other)
    for request, is_there in ((again, True), (other, False)):
        assert beside.has_looked(request)
        message = beside.told(request)
        assert message is not None
        assert bool(message.loads) == is_there


def test_weights_that_change_within_a_step(beside: Beside) -> None:
    """One message is of one generation."""
    beside.know()
    requests = [beside.arrives(number) for number in range(3)]
    for request in requests:
        assert beside.has_looked(request)
    beside.connector.update_state_after_alloc(requests[0], 0)
    beside.know(2)
    beside.connector.update_state_after_alloc(requests[1], 0)
    message = beside.connector.build_connector_meta(None)
    assert (message.generation, [place.mm_hash for place in message.saves]) == (1, ["image-0"])
    beside.connector.update_state_after_alloc(requests[2], 0)
    assert beside.connector.build_connector_meta(None).generation == 2


def test_two_requests_of_one_step_with_one_image(beside: Beside) -> None:
    beside.know()
    first, second = beside.arrives(0), beside.arrives(0)
    second.request_id = "second"
    beside.connector.on_request_added(second)
    assert beside.has_looked(first)
    assert beside.has_looked(second)  # both before a place is given away: who looks later waits for the rank to fill it
    for request in (first, second):
        beside.connector.update_state_after_alloc(request, 0)
    message = beside.connector.build_connector_meta(None)
    assert len(message.saves) == 1
    assert beside.connector.build_connector_meta(None) is None


def test_a_request_that_ends_is_forgotten(beside: Beside) -> None:
    beside.know()
    beside.tier.reading.shut()
    request = beside.arrives(0)
    assert not beside.may_go_on(request)
    assert beside.connector.request_finished(request) == (False, None)
    assert beside.may_go_on(request)
    assert not beside.connector._requests
    assert not beside.connector._ahead_bytes


class Config:
    """As much of a VllmConfig as is looked at."""

    def __init__(self) -> None:
        self.scheduler_config = SimpleNamespace(max_num_batched_tokens=100)
        self.parallel_config = SimpleNamespace(tensor_parallel_size=2)
        self.model_config = None
        self.additional_config: dict[str, Any] = {}


@pytest.mark.slow
@pytest.mark.parametrize("opens", [True, False])
def test_an_engine_without_a_request_leaves_nothing_behind(opens: bool) -> None:
    """Neither its memory nor its store, which another engine's configuration could be taken for."""
    gc.collect()
    before, config = open_files(), Config()
    assert hooks.prepare(config).startswith("/proc/")
    if opens:
        hooks.open_store(config, [{"row": 1, **FACTS}, {}, {"row": 0, **FACTS}])
        assert id(config) in hooks._opened
    assert open_files() - before
    number = id(config)
    del config
    gc.collect()
    assert not open_files() - before
    assert number not in hooks._opened
    assert number not in hooks._prepared


@pytest.mark.parametrize("told", [[{"row": 0, **FACTS}], [{"row": 0, **FACTS}, {"row": 1, **FACTS, "sample": "other"}]])
def test_ranks_that_are_not_alike_share_nothing(told: list[dict[str, Any]]) -> None:
    """Some that does not say anything, and two whose towers give other features."""
    before, config = open_files(), Config()
    hooks.prepare(config)
    with pytest.raises(StoreUnusable):
        hooks.open_store(config, told)
    assert not open_files() - before


def test_it_goes_with_its_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(Connector, "shutdown", lambda self: ended.append(True))
    beside = Beside()
    assert beside.scheduler.ec_connector is beside.connector
    del beside.scheduler
    assert ended == [True]
