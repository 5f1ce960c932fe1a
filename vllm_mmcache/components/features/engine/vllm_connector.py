# SPDX-License-Identifier: Apache-2.0
"""vLLM's encoder-cache connector beside a scheduler: says which features are taken from the store, and keeps new ones.

Engine process; one a scheduler, on both model runners.
"""

import logging
import math
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

from vllm_mmcache.base import settings, status, uses
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.base.worker_threads import Threads
from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.engine.request_images import RequestImages, WantedImage
from vllm_mmcache.components.features.engine.store import Store
from vllm_mmcache.components.features.engine.transfers import Ranks, TransferTracker
from vllm_mmcache.components.features.identity import Identity
from vllm_mmcache.components.features.message import Message
from vllm_mmcache.components.lazy_processing.pixel_pool import PixelFuture, Pixels
from vllm_mmcache.components.lazy_processing.vllm_item import is_deferred
from vllm_mmcache.content import image_namer
from vllm_mmcache.content.digests import inputs_digest
from vllm_mmcache.metrics import transport
from vllm_mmcache.storage.write_behind import EXIT_S

logger = logging.getLogger("vllm.mmcache")

TRANSIT_BYTES = 256 * 1024**2  # of the arena where nothing is kept in RAM


class Connector(ECConnectorBase):  # type: ignore[misc]
    """One engine's store, as vLLM's scheduler sees it. The scheduler's thread."""

    def __init__(self, vllm_config: Any, arena: Arena, ranks: Ranks, store: Store) -> None:
        # Not ECConnectorBase's, which asks for an ec_transfer_config.
        self.store = store
        self.ranks = ranks
        self.is_closed = False
        """Whether nothing is taken or kept any more; images that come without their pixels still get them."""
        self._arena = arena
        self.copying = TransferTracker(store, arena, ranks)
        # A drafter that is ahead by some tokens needs the images there.
        self._reach = vllm_config.scheduler_config.max_num_batched_tokens
        self._reach += getattr(vllm_config, "num_prefill_lookahead_tokens", 0)
        self._scheduler: Any = None
        self._requests: dict[str, RequestImages] = {}
        # What one request has loaded and not used yet must not go for what another one loads. Half: RAM lets go of what
        # was used longest ago, and what is used while something waits for its turn is as much again.
        self._ram_bytes = arena.num_bytes
        self._most_begun_bytes = arena.num_bytes // 2
        self._begun: dict[WantedImage, RequestImages] = {}
        self._begun_bytes = 0
        self._held: list[WantedImage] = []  # until the end of this step
        self._unloaded: list[tuple[str, Any]] = []  # requests and features for which the tower runs in this step
        self._digests = Threads("digest", 2)
        self._pixels = Pixels(vllm_config.model_config)
        self._failed: set[str] = set()
        self._refuted: dict[str, list[str]] = {}  # by the request that fails, images whose records are none of theirs
        self._message: Message | None = None
        self._named: set[str] = set()  # of this step
        self._spent_s = 0.0  # of this step's bound
        self._held_back: set[str] = set()  # requests that may not go on in this step

    def serve(self, scheduler: Any) -> None:
        """Become the scheduler's connector."""
        scheduler.ec_connector = self
        self._scheduler = weakref.proxy(scheduler)
        weakref.finalize(scheduler, self.shutdown)

    @property
    def has_scheduler(self) -> bool:
        """Whether a scheduler has taken it, which happens with the first request."""
        return self._scheduler is not None

    # Scheduler's thread, when a request arrives

    def on_request_added(self, request: Any) -> None:
        """Begin to look for the features of a request's images, as far as they don't lie in what is cached as KV."""
        if not request.mm_features:
            return
        keeps = status.is_on("features") and not self.is_closed and uses.run_of(request) != "cold"
        is_kept = keeps and not image_namer.is_client(request)
        trusted = image_namer.is_identity(request)
        wanted = [self._wanted(feature, is_kept=is_kept, trusted=trusted) for feature in request.mm_features]
        added = [one for one in wanted if one is not None]
        if not added:
            return
        if request.request_id in self._scheduler.requests:  # more of a session: its place is known when it is its turn
            self._requests.setdefault(request.request_id, RequestImages()).add(added)
            return
        images = self._requests[request.request_id] = RequestImages()
        images.add(added)
        images.place(request.mm_features)
        if (keeps and self.store.below) or any(one.comes_without_pixels or one.pixels is not None for one in added):
            images.look_from(self._num_cached_tokens(request))
        self._look_ahead(images)

    def _num_cached_tokens(self, request: Any) -> int:
        """How much of a request's KV is cached now, in all layers: vLLM's own lookup, which counts and holds nothing.

        A KV connector may have more. What goes before the request is scheduled is looked for then.
        """
        manager = self._scheduler.kv_cache_manager
        if not manager.prefix_cache_lookup_enabled(request):
            return 0
        found = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return int(found[1])

    def _wanted(self, feature: Any, *, is_kept: bool, trusted: bool) -> WantedImage | None:
        """What there is to look for; `trusted`: whether the image's name says what it shows."""
        is_kept = is_kept and self.ranks.keeps(feature.modality)
        if not (is_kept or is_deferred(feature.data)):
            return None
        data = feature.data if feature.data is not None else {}
        if any(name.endswith("embeds") for name in data):
            return None  # ready-made embeddings never meet the tower
        if not trusted and feature.data is None:
            return None
        return WantedImage(
            feature=feature,
            shape=self.ranks.shape(feature.mm_position.get_num_embeds()),
            is_kept=is_kept,
            comes_without_pixels=is_deferred(feature.data),
            pixels=None if trusted or not is_kept else data,
            identifier=feature.identifier if trusted and is_kept else "",
        )

    def _look_ahead(self, images: RequestImages) -> None:
        """Begin for images that are needed later, in their order, as long as there is room for what that brings."""
        while (one := images.next_to_look_for()) is not None:
            if not self._has_room(images, one):
                return
            images.looked()
            self._begin(images, one)
            if (
                self._pixels.may_begin_ahead
                and not (one.fetch is not None and one.fetch.is_waited_for and not one.fetch.is_done)
                and is_deferred(one.feature.data)
                and not self._is_in_ram(one)
            ):
                self._begin_pixels(one)

    def _has_room(self, images: RequestImages, wanted: WantedImage, *, is_next: bool = False) -> bool:
        """Whether an image's features may be brought into RAM beside what is there to be used.

        Those that come next may take all of it where no other request has begun something.
        """
        size = self.store.ram.slot_bytes(wanted.shape.num_bytes) - wanted.begun_bytes if wanted.is_kept else 0
        if self._begun_bytes + size > self._most_begun_bytes:
            found_nothing = [one for one in self._begun if one.fetch and one.fetch.is_done and not one.fetch.source]
            self._let_go(found_nothing)
        if is_next and self._begun_bytes == images.begun_bytes:
            return self._begun_bytes + size <= self._ram_bytes
        return self._begun_bytes + size <= self._most_begun_bytes

    def _begin(self, images: RequestImages, wanted: WantedImage, *, is_urgent: bool = False) -> None:
        """Begin to look for an image's features; the room that they need is taken until they are used."""
        self._look_for(wanted, is_urgent=is_urgent)
        is_begun = not wanted.fetch.is_done if wanted.fetch is not None else not wanted.identifier
        if is_begun and wanted.is_kept and wanted not in self._begun:
            wanted.begun_bytes = self.store.ram.slot_bytes(wanted.shape.num_bytes)
            self._begun[wanted] = images
            images.begun_bytes += wanted.begun_bytes
            self._begun_bytes += wanted.begun_bytes

    def _let_go(self, wanted: Iterable[WantedImage]) -> None:
        """What was begun for them was used, or is not needed."""
        for one in wanted:
            if (images := self._begun.pop(one, None)) is not None:
                images.begun_bytes -= one.begun_bytes
                self._begun_bytes -= one.begun_bytes
                one.begun_bytes = 0

    def _look_for(self, wanted: WantedImage, *, is_urgent: bool = False) -> None:
        """Begin to fetch, or first to find out what the image is; nothing where that was begun."""
        if wanted.fetch is not None:
            return
        if wanted.identifier:
            identity = self.ranks.identity(wanted.identifier, wanted.modality)
            if identity is not None:
                wanted.fetch = self.store.fetch(identity, wanted.shape, self._pixels_s(wanted), is_urgent)
        elif wanted.pixels is not None:
            pixels, wanted.pixels = wanted.pixels, None

            def digest() -> None:
                wanted.identifier = f"{wanted.name}:{inputs_digest(pixels.get_data())}"
                self._look_for(wanted, is_urgent=is_urgent)

            if not self._digests.submit(digest):
                wanted.until = 0.0  # nobody will say what it is

    def _is_in_ram(self, wanted: WantedImage) -> bool:
        fetch = wanted.fetch
        return fetch is not None and fetch.is_done and self.store.ram.has(fetch.identity.key)

    def _begin_pixels(self, wanted: WantedImage) -> PixelFuture | None:
        if wanted.making is None:
            name = wanted.feature.mm_hash or wanted.name
            wanted.making = self._pixels.begin(wanted.feature.data, wanted.shape.num_tokens, name)
        return wanted.making

    def _pixels_s(self, wanted: WantedImage) -> float:
        """How long pixels would take that the tower needs before it can run; infinite while that is not known."""
        if not is_deferred(wanted.feature.data):
            return 0.0
        seconds = self._pixels.seconds(wanted.shape.num_tokens)
        return math.inf if seconds is None else seconds

    # Scheduler's thread, in a step

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the request may go on; False while features of an image that comes next are worth waiting for.

        Nor may it while the pixels of such an image are being made: none are made in the step. vLLM asks for every
        request with images in every step, also where only its answer goes on.
        """
        images = self._requests.get(request.request_id)
        if images is None or num_computed_tokens >= images.settled_from:
            return True
        may_go_on = True
        with failsafe("features"):
            may_go_on = self._may_go_on(request, images, num_computed_tokens)
        if not may_go_on:
            self._held_back.add(request.request_id)
        return may_go_on

    def _may_go_on(self, request: Any, images: RequestImages, num_computed_tokens: int) -> bool:
        images.place(request.mm_features)
        self._let_go(images.advance(num_computed_tokens))
        near = images.near(self._reach)
        pending = [one for one in near if self._is_awaited(images, one)]
        self._look_ahead(images)
        if not pending:
            return True
        self._wait(request, pending)
        done = [(one, one.making) for one in pending if one.making is not None and one.making.done()]
        if failed := [(one, error) for one, making in done if (error := making.exception()) is not None]:
            logger.error("mmcache: a request fails, since the pixels of an image can't be made: %s", failed[0][1])
            self._failed.add(request.request_id)
            self._refuted[request.request_id] = [one.feature.mm_hash or one.name for one, _ in failed]
            return False
        return not any(self._is_awaited(images, one) for one in pending)

    def _is_awaited(self, images: RequestImages, wanted: WantedImage) -> bool:
        return self._is_on_its_way(images, wanted) or self._lacks_pixels(wanted)

    def _is_on_its_way(self, images: RequestImages, wanted: WantedImage) -> bool:
        """Whether an image's features are, and are worth waiting for."""
        if not wanted.is_kept:
            return False
        if self._has_gone(wanted) and not wanted.is_retried:
            wanted.fetch, wanted.is_retried = None, True
        is_over = wanted.until is not None and time.monotonic() >= wanted.until
        if wanted.fetch is None:
            if self._is_known_in_ram(wanted) or (not is_over and self._has_room(images, wanted, is_next=True)):
                self._begin(images, wanted, is_urgent=True)
                if wanted.fetch is None and wanted.identifier:  # its weights are not known yet
                    return False
            elif is_over or self._begun_bytes == images.begun_bytes:
                return False  # nobody else will make room
        fetch = wanted.fetch
        if fetch is not None:
            if fetch.is_done or not fetch.is_waited_for:
                return False
            self.store.hurry(fetch)
        if wanted.until is None:  # also while it waits for room, which the tower does not need
            costs, pixels_s = self.store.costs, self._pixels_s(wanted)
            wanted.until = costs.wait_until(images.latest_until, wanted.shape.num_tokens, pixels_s)
            images.latest_until = wanted.until
        return time.monotonic() < wanted.until

    def _is_known_in_ram(self, wanted: WantedImage) -> bool:
        identity = self.ranks.identity(wanted.identifier, wanted.modality) if wanted.identifier else None
        return identity is not None and self.store.ram.has(identity.key)

    def _has_gone(self, wanted: WantedImage) -> bool:
        """Whether features were found and let go of before they were used."""
        fetch = wanted.fetch
        return fetch is not None and fetch.is_done and bool(fetch.source) and not self._is_in_ram(wanted)

    def _lacks_pixels(self, wanted: WantedImage) -> bool:
        """Whether pixels are needed and still being made; once they are, the image has them."""
        if not self._needs_pixels(wanted):
            return False
        making = self._begin_pixels(wanted)
        if making is None or not making.done() or making.exception() is not None:
            return True
        wanted.feature.data = making.result()
        return False

    def _needs_pixels(self, wanted: WantedImage) -> bool:
        """Whether an image has no pixels, and its features are not in RAM; if they are, they stay for this step."""
        if not is_deferred(wanted.feature.data):
            return False
        fetch = wanted.fetch
        if wanted.held is None and fetch is not None and fetch.is_done:
            wanted.held = self.store.hold_if_there(fetch.identity, wanted.shape)
            if wanted.held is not None:
                self._held.append(wanted)
        return wanted.held is None

    def _wait(self, request: Any, pending: Sequence[WantedImage]) -> None:
        """Where nobody else is served: a moment, since what is near comes within it.

        An engine without anything to compute would else ask again and again, and take the time of those who make it.
        """
        left = settings.current().store_step_wait_s - self._spent_s
        if left <= 0 or any(
            one is not request and one.request_id not in self._held_back for one in self._scheduler.running
        ):
            return
        start = time.perf_counter()
        if makings := [one.making for one in pending if one.making is not None]:
            futures.wait(makings, left)
        elif fetches := [one.fetch for one in pending if one.fetch is not None]:
            self.store.wait(fetches, left)
        self._spent_s += time.perf_counter() - start

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """An image will be encoded in this step: tell the ranks where its features lie, or where they shall go."""
        feature = request.mm_features[index]
        images = self._requests.get(request.request_id)
        wanted = images.of(feature) if images is not None else None
        is_loaded = False
        with failsafe("features"):
            is_loaded = wanted is not None and self._mention(wanted)
            if is_loaded:
                uses.note(request, "features")
        if wanted is not None and wanted.comes_without_pixels and not is_loaded:
            self._unloaded.append((request.request_id, feature))
        if is_deferred(feature.data):
            message = self._message_of_step(self.ranks.generation())
            message.rows[feature.identifier] = feature.mm_position.get_num_embeds()

    def _message_of_step(self, generation: int) -> Message:
        """What the ranks are told with this step; begun for a generation of weights where there is none yet."""
        if self._message is None:
            self._message = Message(generation)
        return self._message

    def _mention(self, wanted: WantedImage) -> bool:
        """Whether the ranks take the image's features from RAM."""
        generation = self.ranks.generation()
        if not wanted.identifier or not generation or not status.is_on("features"):
            return False
        identity = self.ranks.identity(wanted.identifier, wanted.modality)
        if identity is None or wanted.name in self._named:
            return False
        if self._message is not None and self._message.generation != generation:
            return False
        self._named.add(wanted.name)
        return self._tell(generation, wanted, identity)

    def _tell(self, generation: int, wanted: WantedImage, identity: Identity) -> bool:
        message = self._message_of_step(generation)
        slot = self.store.find(identity, wanted.shape)
        if slot is not None:
            try:
                message.loads.append(self.copying.load(wanted.name, slot, wanted.shape))
            except BaseException:
                self.store.release(slot)
                raise
            self._note(wanted, (wanted.fetch.source if wanted.fetch is not None else "") or self.store.ram.name)
            return True
        if wanted.fetch is not None and wanted.fetch.passed_over:
            self._note(wanted, f"tower_faster_than_{wanted.fetch.passed_over[0]}")
        slot = self.store.reserve(identity, wanted.shape)
        if slot is None:
            return False
        try:
            message.saves.append(self.copying.save(wanted.name, slot, identity, wanted.shape))
        except BaseException:
            self.store.discard(slot, identity)
            raise
        return False

    def _note(self, wanted: WantedImage, source: str) -> None:
        if status.is_on("observe"):
            transport.note_feature_source(wanted.name, source)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """What the ranks are told with this step; None where there is nothing."""
        with failsafe("features"):
            self._send_pixels(scheduler_output)
        message, self._message = self._message, None
        self._named.clear()
        self._spent_s = 0.0
        self._held_back.clear()
        for one in self._held:
            if one.held is not None:
                self.store.release(one.held)
                one.held = None
        self._held.clear()
        return message

    def _send_pixels(self, scheduler_output: Any) -> None:
        """To the ranks, those that the tower needs and that were not made when the image was sent to them.

        vLLM sends an image's data with its request, once: what is here replaced later reaches no other process.
        """
        unloaded, self._unloaded = self._unloaded, []
        if not unloaded:
            return
        sent = {one.req_id for one in scheduler_output.scheduled_new_reqs}
        for request_id, feature in unloaded:
            if request_id not in sent and not is_deferred(feature.data):
                self._message_of_step(self.ranks.generation()).pixels[feature.identifier] = feature.data

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
        # Of a request that vLLM was to fail in this step, and that its client had aborted, there is no output.
        self._refuted = {one: names for one, names in self._refuted.items() if one in self._failed}

    def request_finished(self, request: Any) -> tuple[bool, None]:
        """Whatever was begun for it goes on, for the next one."""
        if (images := self._requests.pop(request.request_id, None)) is not None:
            self._let_go(images)
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
        self.close()
        self._pixels.close()

    def close(self, *, writes: bool = True) -> None:
        """Take and keep nothing any more, in a few seconds: threads end, tiers are written, the arena is let go.

        Without `writes` what waits to be written to a tier is dropped: it may be what is wrong. Also again. Between two
        steps. Images that come without their pixels still get them, since an API server may send some until it knows.
        """
        if self.is_closed:
            return
        self.is_closed = True
        for one in self._held:
            if one.held is not None:
                self.store.release(one.held)
        self._held.clear()
        self._let_go(list(self._begun))
        for images in self._requests.values():
            for wanted in images:
                wanted.give_up()
        self._digests.close()
        if not writes:
            self.store.drop_writes()  # also what ranks give while they end their copies
        self.copying.wait(1.0)
        self.copying.close()
        self.store.close(EXIT_S if writes else 0.0)
        self.ranks.close()
        self._arena.close()

    # A worker's part of the interface, which is not ours: components/features/worker/hooks.py

    def start_load_caches(self, encoder_cache: Any, **kwargs: Any) -> None:
        """Never called."""

    def save_caches(self, encoder_cache: Any, mm_hash: str, **kwargs: Any) -> None:
        """Never called."""
