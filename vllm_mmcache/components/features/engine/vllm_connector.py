# SPDX-License-Identifier: Apache-2.0
"""vLLM's encoder-cache connector beside a scheduler: says which features are taken from the store, and keeps new ones.

Engine process; one a scheduler, on both model runners.
"""

import logging
import math
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

from vllm_mmcache.base import config_payload, settings, status
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.base.worker_threads import Threads
from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.engine.store import Fetch, Store
from vllm_mmcache.components.features.engine.transfers import Ranks, TransferTracker
from vllm_mmcache.components.features.identity import Identity
from vllm_mmcache.components.features.message import Message
from vllm_mmcache.components.features.package import Shape
from vllm_mmcache.components.lazy_processing.pixel_pool import PixelFuture, Pixels
from vllm_mmcache.components.lazy_processing.vllm_item import is_deferred
from vllm_mmcache.content import client_hashes
from vllm_mmcache.content.digests import inputs_digest
from vllm_mmcache.metrics import transport

logger = logging.getLogger("vllm.mmcache")

TRANSIT_BYTES = 256 * 1024**2  # of the arena where nothing is kept in RAM


@dataclass(eq=False)
class _Wanted:
    """One image or video of a request that waits for the first time."""

    modality: str
    name: str
    end: int
    """Of its tokens in the prompt, exclusive."""
    start: int
    shape: Shape
    feature: Any
    """vLLM's: its data is replaced where pixels are made after all."""
    pixels: Any
    """What the processor made of it, where its name does not say what it shows; else None."""
    identifier: str = ""
    """That of its features; empty where they are not kept, and until it is known what the pixels show."""
    fetch: Fetch | None = None
    until: float | None = None
    """When the request goes on without it; from the first time that it could have been scheduled."""
    making: PixelFuture | None = None
    """Of its pixels, where it came without them and they are needed."""


class Connector(ECConnectorBase):  # type: ignore[misc]
    """One engine's store, as vLLM's scheduler sees it. The scheduler's thread."""

    def __init__(self, vllm_config: Any, arena: Arena, ranks: Ranks, store: Store) -> None:
        # Not ECConnectorBase's, which asks for an ec_transfer_config.
        self.store = store
        self.ranks = ranks
        self.copying = TransferTracker(store, arena, ranks)
        self._reach = vllm_config.scheduler_config.max_num_batched_tokens
        self._scheduler: Any = None
        self._requests: dict[str, dict[int, _Wanted]] = {}
        self._ahead: dict[str, list[_Wanted]] = {}  # images of requests that were not passed yet
        self._digests = Threads("digest", 2)
        self._pixels = Pixels(vllm_config.model_config)
        self._failed: set[str] = set()
        self._refuted: dict[str, list[str]] = {}  # by the request that fails, images whose records are none of theirs
        self._message: Message | None = None
        self._named: set[str] = set()  # of this step
        self._trusts_names = config_payload.names_are_ours(vllm_config)
        self._spent_s = 0.0  # of this step's bound

    def serve(self, scheduler: Any) -> None:
        """Become the scheduler's connector."""
        scheduler.ec_connector = self
        self._scheduler = weakref.proxy(scheduler)
        weakref.finalize(scheduler, self.shutdown)

    # Scheduler's thread, when a request arrives

    def on_request_added(self, request: Any) -> None:
        """Begin to look for the features of a request's images."""
        if not request.mm_features or not status.is_on("features"):
            return
        wanted = {}
        for index, feature in enumerate(request.mm_features):
            if (one := self._wanted(feature, is_kept=not client_hashes.are_in(request))) is not None:
                wanted[index] = one
                self._look_for(one)
                if self._needs_pixels(one) and self._pixels.may_begin_ahead and not self._may_do_without(request, one):
                    self._begin_pixels(one)
        if wanted:
            self._requests[request.request_id] = wanted
            self._ahead[request.request_id] = list(wanted.values())

    def _wanted(self, feature: Any, *, is_kept: bool) -> _Wanted | None:
        is_kept = is_kept and self.ranks.keeps(feature.modality)
        if not (is_kept or is_deferred(feature.data)):
            return None
        data = feature.data if feature.data is not None else {}
        if any(name.endswith("embeds") for name in data):
            return None  # ready-made embeddings never meet the tower
        trusted = status.is_on("identity") if "api" in status.roles() else self._trusts_names
        if not trusted and feature.data is None:
            return None
        place = feature.mm_position
        return _Wanted(
            modality=feature.modality,
            name=feature.identifier,
            start=place.offset,
            end=place.offset + place.length,
            shape=self.ranks.shape(place.get_num_embeds()),
            feature=feature,
            pixels=None if trusted or not is_kept else data,
            identifier=feature.identifier if trusted and is_kept else "",
        )

    def _look_for(self, wanted: _Wanted) -> None:
        """Begin to fetch, or first to find out what the image is."""
        if wanted.identifier:
            identity = self.ranks.identity(wanted.identifier, wanted.modality)
            if identity is not None:
                wanted.fetch = self.store.fetch(identity, wanted.shape, self._pixels_s(wanted))
        elif wanted.pixels is not None:
            pixels, wanted.pixels = wanted.pixels, None

            def digest() -> None:
                wanted.identifier = f"{wanted.name}:{inputs_digest(pixels.get_data())}"
                self._look_for(wanted)

            if not self._digests.submit(digest):
                wanted.until = 0.0  # nobody will say what it is

    def _may_do_without(self, request: Any, wanted: _Wanted) -> bool:
        """Whether features may still come, or the KV of an image seems to be cached, at least of its end."""
        fetch = wanted.fetch
        if fetch is not None and fetch.is_waited_for and not fetch.is_done:
            return True
        place = (wanted.end - 1) // self._scheduler.hash_block_size
        if place >= len(request.block_hashes):
            return False
        blocks = self._scheduler.kv_cache_manager.block_pool
        return blocks.get_cached_block(request.block_hashes[place], [0]) is not None

    def _needs_pixels(self, wanted: _Wanted) -> bool:
        """Whether an image came without pixels, and its features are not in RAM."""
        if not is_deferred(wanted.feature.data):
            return False
        fetch = wanted.fetch
        return fetch is None or not fetch.is_done or not self.store.ram.has(fetch.identity.key)

    def _begin_pixels(self, wanted: _Wanted) -> PixelFuture:
        if wanted.making is None:
            wanted.making = self._pixels.begin(wanted.feature.data, wanted.shape.num_tokens)
        return wanted.making

    def _lacks_pixels(self, wanted: _Wanted) -> bool:
        """Whether pixels are needed and still being made; once they are, the image has them."""
        if not self._needs_pixels(wanted):
            return False
        making = self._begin_pixels(wanted)
        if not making.done() or making.exception() is not None:
            return True
        if (made := making.result()) is not None:
            wanted.feature.data = made
        return False

    def _pixels_s(self, wanted: _Wanted) -> float:
        """How long pixels would take that the tower needs before it can run; infinite while that is not known."""
        if not is_deferred(wanted.feature.data):
            return 0.0
        seconds = self._pixels.seconds(wanted.shape.num_tokens)
        return math.inf if seconds is None else seconds

    # Scheduler's thread, in a step

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the request may go on; False while features of an image that comes next are worth waiting for.

        vLLM asks for every request with images in every step, also where only its answer goes on.
        """
        if request.request_id not in self._ahead:
            return True
        with failsafe("features"):
            return self._may_go_on(request, num_computed_tokens)
        return True

    def _may_go_on(self, request: Any, num_computed_tokens: int) -> bool:
        ahead = self._ahead.get(request.request_id)
        if ahead is None:
            return True
        ahead = [one for one in ahead if num_computed_tokens < one.end]
        if not ahead:
            del self._ahead[request.request_id]
            return True
        self._ahead[request.request_id] = ahead
        near = [one for one in ahead if one.start < num_computed_tokens + self._reach]
        pending = [one for one in near if self._is_awaited(one)]
        if not pending:
            return True
        self._wait(pending)
        done = [(one, one.making) for one in pending if one.making is not None and one.making.done()]
        if failed := [(one, error) for one, making in done if (error := making.exception()) is not None]:
            logger.error("mmcache: a request fails, since the pixels of an image can't be made: %s", failed[0][1])
            self._failed.add(request.request_id)
            self._refuted[request.request_id] = [one.feature.mm_hash or one.name for one, _ in failed]
            return False
        return not any(self._is_awaited(one) for one in pending)

    def _is_awaited(self, wanted: _Wanted) -> bool:
        return self._is_on_its_way(wanted) or self._lacks_pixels(wanted)

    def _is_on_its_way(self, wanted: _Wanted) -> bool:
        """Whether an image's features are, and are worth waiting for."""
        if wanted.fetch is None and wanted.identifier:  # its weights were not known when it came
            self._look_for(wanted)
            if wanted.fetch is None:  # nor are they now
                return False
        fetch = wanted.fetch
        if fetch is not None and (fetch.is_done or not fetch.is_waited_for):
            return False
        now = time.monotonic()
        if wanted.until is None:
            wanted.until = now + self.store.costs.max_wait_s(wanted.shape.num_tokens, self._pixels_s(wanted))
        return now < wanted.until

    def _wait(self, pending: Sequence[_Wanted]) -> None:
        """Where nobody else is served: a moment, since what is near comes within it."""
        left = settings.current().store_step_wait_s - self._spent_s
        if left <= 0 or self._scheduler.running:
            return
        start = time.perf_counter()
        if makings := [one.making for one in pending if one.making is not None]:
            futures.wait(makings, left)
        elif fetches := [one.fetch for one in pending if one.fetch is not None]:
            self.store.wait(fetches, left)
        self._spent_s += time.perf_counter() - start

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """An image will be encoded in this step: tell the ranks where its features lie, or where they shall go."""
        with failsafe("features"):
            self._mention(request, index)
        feature = request.mm_features[index]
        if is_deferred(feature.data):
            if self._message is None:
                self._message = Message(self.ranks.generation())
            self._message.rows[feature.identifier] = feature.mm_position.get_num_embeds()

    def _mention(self, request: Any, index: int) -> None:
        feature = request.mm_features[index]
        generation = self.ranks.generation()
        wanted = self._requests.get(request.request_id, {}).get(index)
        if wanted is None or not wanted.identifier or not generation or not status.is_on("features"):
            return
        identity = self.ranks.identity(wanted.identifier, wanted.modality)
        if identity is None or feature.identifier in self._named:
            return
        if self._message is not None and self._message.generation != generation:
            return
        self._named.add(feature.identifier)
        self._tell(generation, wanted, identity)

    def _tell(self, generation: int, wanted: _Wanted, identity: Identity) -> None:
        if self._message is None:
            self._message = Message(generation)
        slot = self.store.find(identity, wanted.shape)
        if slot is not None:
            self._message.loads.append(self.copying.load(wanted.name, slot, wanted.shape))
            self._note(wanted, (wanted.fetch.source if wanted.fetch is not None else "") or self.store.ram.name)
            return
        if wanted.fetch is not None and wanted.fetch.passed_over:
            self._note(wanted, f"tower_faster_than_{wanted.fetch.passed_over[0]}")
        slot = self.store.reserve(identity, wanted.shape)
        if slot is None:
            return
        try:
            self._message.saves.append(self.copying.save(wanted.name, slot, identity, wanted.shape))
        except BaseException:
            self.store.discard(slot, identity)
            raise

    def _note(self, wanted: _Wanted, source: str) -> None:
        if status.is_on("observe"):
            transport.note_feature_source(wanted.name, source)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """What the ranks are told with this step; None where there is nothing."""
        message, self._message = self._message, None
        self._named.clear()
        self._spent_s = 0.0
        return message

    def take_unavailable_requests(self) -> set[str]:
        """Requests that vLLM is to fail, since an image of theirs can't be processed any more."""
        failed, self._failed = self._failed, set()
        return failed

    def name_refuted(self, by_client: Mapping[int, Any]) -> None:
        """The API server is to forget what it knows of images that nobody could make, as vLLM has it for a cache miss.

        by_client: vLLM's EngineCoreOutputs of a step.
        """
        if not self._refuted:
            return
        for outputs in by_client.values():
            for output in outputs.outputs:
                if (names := self._refuted.pop(output.request_id, None)) is not None:
                    output.mm_cache_miss_hashes = names

    def request_finished(self, request: Any) -> tuple[bool, None]:
        """Whatever was begun for it goes on, for the next one."""
        self._requests.pop(request.request_id, None)
        self._ahead.pop(request.request_id, None)
        return False, None

    def has_cache_item(self, identifier: str) -> bool:
        """Nothing is promised: an image that lies in the arena is sent with those to encode."""
        return False

    def wait_until_known(self, timeout_s: float) -> bool:
        """Wait until all ranks know their weights, without which nothing is used. Returns False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not (known := self.ranks.generation()) and time.monotonic() < deadline:
            time.sleep(0.002)
        return known > 0

    def flush(self, timeout_s: float) -> bool:
        """Wait until what the ranks gave is in every tier. Returns False after `timeout_s`."""
        return self.copying.wait(timeout_s) and self.store.flush(timeout_s)

    def shutdown(self) -> None:
        """What is in RAM is written first, within a few seconds."""
        self.copying.wait(1.0)
        self.copying.close()
        self._digests.close()
        self._pixels.close()
        self.store.close()

    # A worker's part of the interface, which is not ours: components/features/worker/hooks.py

    def start_load_caches(self, encoder_cache: Any, **kwargs: Any) -> None:
        """Never called."""

    def save_caches(self, encoder_cache: Any, mm_hash: str, **kwargs: Any) -> None:
        """Never called."""
