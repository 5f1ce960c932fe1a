# SPDX-License-Identifier: Apache-2.0
"""The store beside a scheduler, without an engine: which requests are held back, for what, and what ranks are told."""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from tests.support.packages import SHAPE, features, identity
from tests.support.refusals import no_threads
from tests.support.tiers import LONG_S, MemoryTier, within
from tests.support.vllm_requests import Prompt, make_request, stock_hasher
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
from vllm_mmcache.components.lazy_processing.vllm_item import FIELD, is_deferred
from vllm_mmcache.components.lazy_processing.vllm_pixels import PixelMaker
from vllm_mmcache.content import image_namer

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
        self.trusts_names = False
        """Whether the images of requests that arrive have names that say what they show."""
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
            sampling_params=SamplingParams(extra_args={}),
            pooling_params=None,
            block_hashes=[],
            skip_reading_prefix_cache=False,
            num_tokens=100,
        )
        if self.trusts_names:
            image_namer.mark(request, None)
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
        self.running = [SimpleNamespace(request_id="another request")]
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


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch, beside: Beside) -> Beside:
    """Whose images have names that say what they show; the weights are known, and the tier hangs."""
    beside.trusts_names = True
    monkeypatch.setattr(status, "_states", {})
    beside.know()
    beside.tier.reading.shut()
    return beside


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
    assert not beside.connector._begun_bytes


def computed(beside: Beside, request: Any, num_tokens: int) -> None:
    """Have the KV of a request's first tokens cached."""
    manager = beside.scheduler.kv_cache_manager
    manager.allocate_slots(request, num_tokens)
    manager.free(request)


def with_images(request_id: str, *places: int, num_tokens: int = 100) -> Any:
    """vLLM's own request, with images at these places, whose names say what they show."""
    prompt = Prompt(tuple(range(num_tokens)), tuple((f"image-{place}", place, SHAPE.num_tokens) for place in places))
    request = make_request(prompt, stock_hasher(BLOCK, sha256))
    request.request_id = request_id
    for place, feature in zip(places, request.mm_features, strict=True):
        feature.data = image(place).data
    request.sampling_params = SamplingParams()
    image_namer.mark(request, None)
    return request


def looked_for(beside: Beside, request: Any) -> list[int]:
    """The places of the images for which something was begun at the request's arrival."""
    beside.connector.on_request_added(request)
    found = beside.connector._requests[request.request_id]
    return [one.start for one in found if one.fetch is not None]


PLACES = (8, 32, 56)


@pytest.mark.parametrize(
    ("num_computed", "expected"), [(0, (8, 32, 56)), (24, (32, 56)), (44, (32, 56)), (48, (56,)), (84, ())]
)
def test_where_the_cached_kv_ends(trusting: Beside, num_computed: int, expected: tuple[int, ...]) -> None:
    """Images behind it are looked for in their order, and the one that it ends in."""
    if num_computed:
        computed(trusting, with_images("before", *PLACES), num_computed)
    assert tuple(looked_for(trusting, with_images("now", *PLACES))) == expected


def test_what_one_group_of_layers_lacks_is_not_cached(trusting: Beside) -> None:
    """Full attention has the KV of all, the sliding window lost a block: the control has it, too."""
    computed(trusting, with_images("before", *PLACES), 100)
    assert looked_for(trusting, with_images("control", *PLACES)) == []
    pool, hashes = trusting.scheduler.kv_cache_manager.block_pool, with_images("one", *PLACES).block_hashes
    for number in range(60 // BLOCK, 100 // BLOCK):
        pool.evict_blocks({block.block_id for block in pool.get_cached_block(hashes[number], [1]) or ()})
    assert pool.get_cached_block(hashes[-1], [0]), "full attention has it"
    assert looked_for(trusting, with_images("now", *PLACES)) == [56]


def test_looking_changes_nothing_in_the_cache(trusting: Beside) -> None:
    """Neither what vLLM counts nor what it will evict next."""
    computed(trusting, with_images("before", *PLACES), 100)
    manager = trusting.scheduler.kv_cache_manager

    def state() -> Any:
        free = [block.block_id for block in manager.block_pool.free_block_queue.get_all_free_blocks()]
        return free, vars(manager.prefix_cache_stats) if manager.prefix_cache_stats else None

    before = state()
    looked_for(trusting, with_images("now", *PLACES))
    assert state() == before


def test_loads_for_later_leave_room(trusting: Beside) -> None:
    """Half of RAM, in the order of arrival; what is needed next takes the rest where nobody else has begun."""
    size = trusting.store.ram.slot_bytes(SHAPE.num_bytes)
    trusting.connector._most_begun_bytes = 2 * size
    first, second = with_images("first", *PLACES), with_images("second", 4, 28)
    assert looked_for(trusting, first) == [8, 32]
    assert looked_for(trusting, second) == []
    assert not trusting.may_go_on(first)
    assert [one.fetch is not None for one in trusting.connector._requests["first"]] == [True, True, True]
    assert not trusting.may_go_on(second)
    assert [one.fetch for one in trusting.connector._requests["second"]] == [None, None], "it waits for room"
    trusting.connector.request_finished(first)
    assert not trusting.may_go_on(second)
    assert all(one.fetch is not None for one in trusting.connector._requests["second"])


def without_pixels(number: int) -> MultiModalKwargsItem:
    """An item that came so; what it holds instead is looked at by nobody here."""
    return MultiModalKwargsItem({FIELD: MultiModalFieldElem(data=[torch.empty(0)], field=MultiModalBatchedField())})


class Maker:
    """Makes pixels, where it may, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Any] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

        def make(maker: PixelMaker, item: Any) -> Any:
            assert self.may_go_on.wait(LONG_S)
            self.made.append(item)
            return image(0).data

        monkeypatch.setattr(PixelMaker, "make", make)


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Maker:
    return Maker(monkeypatch)


def lacking(request_id: str, *places: int) -> Any:
    """A request whose images came without their pixels."""
    request = with_images(request_id, *places)
    for feature in request.mm_features:
        feature.data = without_pixels(0)
    return request


def goes_on(beside: Beside, request: Any, num_computed_tokens: int = 0) -> bool:
    """Whether it may within a time in which anything is made."""
    return within(LONG_S, lambda: beside.may_go_on(request, num_computed_tokens))


def step(beside: Beside, request: Any, index: int, *, is_new: bool) -> Message:
    """What ranks are told of a step that encodes an image."""
    beside.connector.update_state_after_alloc(request, index)
    new = [SimpleNamespace(req_id=request.request_id)] if is_new else []
    found = beside.connector.build_connector_meta(SimpleNamespace(scheduled_new_reqs=new))
    assert isinstance(found, Message)
    return found


def test_pixels_made_later_are_sent_with_the_step(trusting: Beside, maker: Maker) -> None:
    """Those of a request that is sent in this step go with it."""
    trusting.tier.reading.open()
    trusting.connector._reach = 40
    request = lacking("a", 8, 64)
    trusting.connector.on_request_added(request)
    assert goes_on(trusting, request)
    assert step(trusting, request, 0, is_new=True).pixels == {}
    assert not is_deferred(request.mm_features[0].data)
    assert goes_on(trusting, request, 40)
    assert step(trusting, request, 1, is_new=False).pixels == {"image-64": request.mm_features[1].data}


def test_a_request_waits_for_its_pixels(trusting: Beside, maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as it takes, also while nobody has time to make them; no rank makes them in a step."""
    trusting.tier.reading.open()
    maker.may_go_on.clear()
    with monkeypatch.context() as patched:
        patched.setattr(trusting.connector._pixels._threads, "submit", lambda job: False)
        request = lacking("a", 8)
        trusting.connector.on_request_added(request)
        assert not within(0.2, lambda: trusting.may_go_on(request))
    assert not within(0.2, lambda: trusting.may_go_on(request))
    maker.may_go_on.set()
    assert goes_on(trusting, request)
    assert len(maker.made) == 1


@pytest.mark.parametrize("is_aborted", [False, True])
def test_an_image_that_nobody_can_make_is_named_with_the_error_of_its_request(
    trusting: Beside, is_aborted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the step that fails it. Where its client has gone meanwhile there is no such output, and nothing is kept."""

    def fail(maker: PixelMaker, item: Any) -> Any:
        raise ValueError("not of this image")

    monkeypatch.setattr(PixelMaker, "make", fail)
    trusting.tier.reading.open()
    connector, request = trusting.connector, lacking("a", 8)
    connector.on_request_added(request)
    assert within(LONG_S, lambda: not trusting.may_go_on(request) and bool(connector._failed))
    if is_aborted:
        connector.request_finished(request)
    assert connector.take_unavailable_requests() == {"a"}
    with_error, later = output_of(*(["b"] if is_aborted else ["b", "a"])), output_of("b", "a")
    connector.name_refuted(with_error)
    connector.name_refuted(later)
    named = [[one.mm_cache_miss_hashes for one in outputs[0].outputs] for outputs in (with_error, later)]
    assert named == [[None] if is_aborted else [None, ["image-8"]], [None, None]]


def output_of(*request_ids: str) -> dict[int, Any]:
    """As vLLM's scheduler has the outputs of a step."""
    return {0: EngineCoreOutputs(outputs=[EngineCoreOutput(one, []) for one in request_ids])}


def test_a_step_waits_where_it_could_compute_nothing(trusting: Beside, maker: Maker) -> None:
    """Else an engine would ask thousands of times a second, in the time of those who make the pixels."""

    def waits(*running: Any) -> bool:
        trusting.scheduler.running = list(running)
        assert not trusting.may_go_on(request)
        spent_s = trusting.connector._spent_s
        step(trusting, request, 0, is_new=False)
        return spent_s > 0

    trusting.tier.reading.open()
    maker.may_go_on.clear()
    request, other = lacking("a", 8), lacking("b", 8)
    for one in (request, other):
        trusting.connector.on_request_added(one)
    assert waits()
    assert waits(request)
    assert not waits(request, other)  # it might be served
    trusting.scheduler.running = [request, other]
    assert not trusting.may_go_on(other)
    assert waits(request, other)
    maker.may_go_on.set()


def test_images_that_are_not_kept_take_no_room(trusting: Beside, maker: Maker) -> None:
    """They are here for their pixels alone, so nothing of them comes into RAM."""
    trusting.connector.ranks.keeps = lambda modality: False  # type: ignore[method-assign]
    request = lacking("a", *PLACES)
    trusting.connector.on_request_added(request)
    assert trusting.connector._requests["a"].next_to_look_for() is None, "all were looked at"
    assert not trusting.connector._begun_bytes


def test_features_that_have_gone_are_fetched_again_into_the_room_that_they_had(trusting: Beside) -> None:
    """An image that takes more than half of RAM has no room beside itself."""
    trusting.tier.reading.open()
    connector = trusting.connector
    trusting.keep(trusting.arrives(8), 8)
    for request_id in [*connector._requests]:
        connector.request_finished(SimpleNamespace(request_id=request_id))
    trusting.arena.board["loads_done"] = 1
    trusting.store.ram.clear()
    size = trusting.store.ram.slot_bytes(SHAPE.num_bytes)
    connector._ram_bytes, connector._most_begun_bytes = size + size // 2, size
    request = with_images("a", 8)
    assert looked_for(trusting, request) == [8]
    (wanted,) = connector._requests["a"]
    assert wanted.fetch is not None
    assert trusting.store.wait([wanted.fetch], LONG_S)
    assert connector._begun_bytes == size
    trusting.store.ram.clear()
    trusting.tier.reading.shut()
    assert not trusting.may_go_on(request), "it waits for the second fetch"
    assert wanted.fetch is not None
    assert connector._begun_bytes == size
    connector.request_finished(request)
    assert not connector._begun_bytes


def test_requests_with_one_image_have_its_pixels_made_once(trusting: Beside, maker: Maker) -> None:
    trusting.tier.reading.open()
    requests = [lacking(name, 8) for name in "abc"]
    for request in requests:
        trusting.connector.on_request_added(request)
    assert all(goes_on(trusting, request) for request in requests)
    assert len(maker.made) == 1
    assert not any(is_deferred(request.mm_features[0].data) for request in requests)


@pytest.mark.parametrize("holds", [True, False], ids=["held", "control"])
def test_features_that_a_step_counts_on_stay(
    trusting: Beside, maker: Maker, monkeypatch: pytest.MonkeyPatch, holds: bool
) -> None:
    """Until the ranks are told of them, though RAM needs the room. The control: they go, and there are no pixels."""
    trusting.tier.reading.open()
    trusting.keep(trusting.arrives(8), 8)
    request = lacking("a", 8)
    trusting.connector.on_request_added(request)
    if not holds:
        monkeypatch.setattr(Connector, "_needs_pixels", lambda self, wanted: False)
    assert trusting.may_go_on(request)
    ram = trusting.store.ram
    others = [ram.reserve(f"other-{number}", ALIGN_BYTES) for number in range(trusting.arena.num_bytes // ALIGN_BYTES)]
    message = step(trusting, request, 0, is_new=True)
    assert [place.mm_hash for place in message.loads] == (["image-8"] if holds else [])
    for slot in others:
        if slot is not None:
            ram.discard(slot)
    assert not trusting.connector._held
    assert maker.made == []


def test_a_request_that_was_preempted_looks_again(trusting: Beside, maker: Maker) -> None:
    """What it found the first time may have gone meanwhile, and then its pixels are made."""
    trusting.tier.reading.open()
    trusting.keep(trusting.arrives(8), 8)
    request = lacking("a", 8)
    trusting.connector.on_request_added(request)
    assert trusting.may_go_on(request)
    assert step(trusting, request, 0, is_new=True).loads
    assert trusting.may_go_on(request, 100)
    trusting.arena.board["loads_done"] = 1
    assert trusting.connector.copying.wait(LONG_S)
    trusting.store.ram.clear()
    trusting.tier.memory.clear()
    assert goes_on(trusting, request, 0)
    message = step(trusting, request, 0, is_new=False)
    assert (message.loads, list(message.pixels)) == ([], ["image-8"])
    assert len(maker.made) == 1


class Config:
    """As much of a VllmConfig as is looked at."""

    def __init__(self) -> None:
        self.scheduler_config = SimpleNamespace(max_num_batched_tokens=100)
        self.parallel_config = SimpleNamespace(tensor_parallel_size=2, node_rank_within_dp=0)
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


@pytest.mark.parametrize("writes", [True, False])
def test_closing_writes_nothing_that_may_be_wrong(
    beside: Beside, writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what waits for a tier nor what the ranks give while it closes; the control is a usual end."""

    def put(number: int) -> None:
        slot = beside.store.reserve(identity(number), SHAPE)
        assert slot is not None
        beside.store.keep(slot, identity(number), SHAPE)

    def wait(timeout_s: float) -> bool:
        """As ranks whose copies take until all that waits is written."""
        put(5)
        beside.tier.writing.open()
        return beside.store.flush(LONG_S)

    beside.tier.writing.shut()
    put(0)
    assert beside.tier.writing.has_come()
    for number in range(1, 5):
        put(number)
    monkeypatch.setattr(beside.connector.copying, "wait", wait)
    beside.connector.close(writes=writes)
    assert len(beside.tier.packages) == (6 if writes else 1)
    assert beside.tier.counts.snapshot()["dropped"] == (0 if writes else 5)


@pytest.mark.parametrize("is_there", [True, False])
def test_no_thread_to_follow_the_ranks(beside: Beside, is_there: bool) -> None:
    """The ranks are told nothing of the image, and nothing of it is held; the next time there are threads again."""
    beside.know()
    beside.trusts_names = True
    request = beside.arrives(0)
    asked = beside.ranks.identity("image-0")
    assert asked is not None
    assert beside.has_looked(request)
    if is_there:
        slot = beside.store.reserve(asked, SHAPE)
        assert slot is not None
        beside.store.keep(slot, asked, SHAPE)
        assert beside.store.flush(LONG_S)
    with no_threads():
        message = beside.told(request)
    assert message is None or not (message.loads or message.saves)
    found = beside.store.ram.hold_if_there(asked.key)
    assert (found.num_holders if found is not None else 0) == is_there
    if found is not None:
        beside.store.release(found)
    message = beside.told(request)
    assert message is not None
    assert (len(message.loads), len(message.saves)) == (is_there, not is_there)
