# SPDX-License-Identifier: Apache-2.0
"""Prepares the items of a request: known ones go to the engine without pixels, unknown ones are processed side by side.

API server process.
"""

import asyncio
import contextvars
import json
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from vllm_mmcache.base import background, settings, status
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.base.lru import Budget, LruTable
from vllm_mmcache.base.settings import Settings
from vllm_mmcache.base.store_url import store_places
from vllm_mmcache.batch.vllm_encoded_image import encoded_in, with_opened
from vllm_mmcache.components.lazy_media.hooks import KnownImage
from vllm_mmcache.components.lazy_media.video.vllm_video import KnownVideo, in_black
from vllm_mmcache.components.lazy_processing.vllm_cache import PreparedItemCache, Ready, TokensCache
from vllm_mmcache.components.lazy_processing.vllm_item import Arguments, defer, is_deferred
from vllm_mmcache.components.lazy_processing.vllm_item_record import (
    FORMAT,
    Kinds,
    are_equal,
    digest_of,
    num_embeds_of,
    num_tokens_of,
)
from vllm_mmcache.components.lazy_processing.vllm_processor import (
    BLANK_PIXELS,
    Processed,
    embeds_by_size,
    inputs_of,
    patches_of_a_side,
    process,
    process_blank,
    updates_of,
    use_one_core,
)
from vllm_mmcache.components.lazy_processing.vllm_processor_facts import processor_facts
from vllm_mmcache.content import tokens_alone
from vllm_mmcache.content.digests import inputs_digest
from vllm_mmcache.metrics import counters
from vllm_mmcache.storage import frame, record_store

logger = logging.getLogger("vllm.mmcache")

MOST_THREADS = 8

KNOWN = Budget(64, 64 * 1024**2)  # sizes of images whose placeholders are at hand

Placeholders = tuple[Sequence[Any], bytes]
"""How vLLM changes the prompt for one item, and the digest of what its record says."""


class ItemRequest(NamedTuple):
    """One image or video of a request, and how it is to be processed."""

    modality: str
    media: KnownImage | KnownVideo
    name: str | None
    arguments: Arguments
    loading: Mapping[str, Any]


class ItemPreparer:
    """What one renderer has of the component."""

    def __init__(self, processor: Any, model_config: Any, cache: Any, tokens_cache: Any = None) -> None:
        self.cache = PreparedItemCache(cache)
        self.tokens_cache = None if tokens_cache is None else TokensCache(tokens_cache)
        self._processor = processor
        self._max_tokens = int(model_config.max_model_len)
        self._facts = inputs_digest(item_facts(model_config, processor))
        self._kinds: dict[str, Kinds | None] = {}
        # Transformers' reckoning knows nothing of arguments, and is asked no more where it was wrong once.
        self._may_reckon = not model_config.multimodal_config.mm_processor_kwargs
        self._known: LruTable[tuple[Any, ...], Placeholders] = LruTable(
            lambda: KNOWN, KNOWN.size_bytes // KNOWN.entries
        )
        num_threads = max(1, min(MOST_THREADS, len(background.cores())))
        self._pool = ThreadPoolExecutor(num_threads, "mmcache-pixels", use_one_core)
        self._lock = threading.Lock()
        self._under_way: dict[str, Future[Processed]] = {}

    def around_async(self, stock: Any) -> Any:
        """BaseRenderer._process_multimodal_async, with what can be made ready before."""

        async def process_multimodal(*args: Any, **kwargs: Any) -> Any:
            cache = self._cache_of(kwargs)
            if cache is None:
                return await stock(*args, **kwargs)
            run = asyncio.get_running_loop().run_in_executor
            given = _named(args, kwargs)
            opening = [
                run(self._pool, contextvars.copy_context().run, one.open) for one in encoded_in(given["mm_data"])
            ]
            _put_opened(given, await asyncio.gather(*opening))
            waits = [
                run(self._pool, contextvars.copy_context().run, self._make_ready, one, cache) for one in _asked(given)
            ]
            with _registered(cache, await asyncio.gather(*waits)):
                return await stock(**given)

        return process_multimodal

    def around(self, stock: Any) -> Any:
        """BaseRenderer._process_multimodal, with what can be made ready before: for LLM()."""

        def process_multimodal(*args: Any, **kwargs: Any) -> Any:
            cache = self._cache_of(kwargs)
            if cache is None:
                return stock(*args, **kwargs)
            submit = self._pool.submit
            given = _named(args, kwargs)
            opening = [submit(contextvars.copy_context().run, one.open) for one in encoded_in(given["mm_data"])]
            _put_opened(given, [wait.result() for wait in opening])
            waits = [submit(contextvars.copy_context().run, self._make_ready, one, cache) for one in _asked(given)]
            with _registered(cache, (wait.result() for wait in waits)):
                return stock(**given)

        return process_multimodal

    def close(self) -> None:
        """Make no more ready."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _cache_of(self, kwargs: Mapping[str, Any]) -> PreparedItemCache | None:
        """The cache of a call of BaseRenderer._process_multimodal; None where nothing can be made ready for it."""
        if not kwargs.get("skip_mm_cache"):
            return self.cache
        return self.tokens_cache if tokens_alone.ASKED.get() else None

    def _make_ready(self, asked: ItemRequest, cache: PreparedItemCache) -> Ready | None:
        """The item, unless vLLM has it; None, too, where it can't be made: vLLM says why when its turn comes."""
        try:
            return self._ready(asked, cache)
        except Exception:
            logger.debug("mmcache: an item could not be made ready", exc_info=True)
            return None

    def _ready(self, asked: ItemRequest, cache: PreparedItemCache) -> Ready | None:
        inputs = inputs_of(*self._plain(asked))
        (mm_hash,) = self._processor._get_mm_hashes(inputs)[asked.modality]
        if cache.is_kept(mm_hash):
            return None
        processed = (
            cache.registered(mm_hash)
            or self._deferred(asked, inputs, mm_hash, cache)
            or self._processed(asked, inputs, mm_hash)
        )
        asked.media.processor = "deferred" if is_deferred(processed[0]) else "run"
        return mm_hash, processed

    def _plain(self, asked: ItemRequest) -> tuple[Any, ...]:
        return self._processor, asked.modality, asked.media, asked.name, asked.arguments, asked.loading

    def _deferred(self, asked: ItemRequest, inputs: Any, mm_hash: str, cache: PreparedItemCache) -> Processed | None:
        """The item without its pixels, if it may go without and its record is known."""
        is_for_engine = cache is self.cache
        may_go = may_defer() if is_for_engine else status.is_on("identity")
        if asked.media.origin is None or not may_go or self.cache.is_refuted(mm_hash):
            return None
        key = self._key(asked.modality, mm_hash)
        processed = record_store.current().read(key, lambda record: self._restored(asked, inputs, record))
        if processed is not None and is_for_engine:
            counters.ITEMS_DEFERRED.add()
        return processed

    def _restored(self, asked: ItemRequest, inputs: Any, record: bytes) -> Processed | None:
        """The item of a record; None for what can be none of this image, whatever somebody has put there."""
        assert asked.media.origin is not None
        try:
            same = self._same(asked, record)
            known = None if same is None else self._known.get(same)
            small = self._kinds_of(asked.modality).restore(record, is_known=known is not None)
            if known is None:
                known = self._placeholders(asked, inputs, record, small)
                if same is not None:
                    self._known.admit(same, known)
            updates, digest = known
            return defer(small, asked.modality, asked.media.origin, asked.arguments, digest), updates
        except Exception as error:  # a model's own code may raise anything for fields that it never made
            logger.debug("mmcache: an image is processed although it has a record: %s", error)
            return None

    def _same(self, asked: ItemRequest, record: bytes) -> tuple[Any, ...] | None:
        """What images have in common that have the same placeholders; None for videos, whose times count, too."""
        if not isinstance(asked.media, KnownImage):
            return None
        return record, asked.media.record.size, asked.media.record.mode, json.dumps(dict(asked.arguments))

    def _placeholders(self, asked: ItemRequest, inputs: Any, record: bytes, small: Any) -> Placeholders:
        """How the prompt changes for an item, and the digest of all that its record says.

        Raises: ValueError where no prompt can hold them; what a model's own code raises for fields that it never made.
        """
        if isinstance(asked.media, KnownVideo):  # some models measure the frames
            inputs = inputs_of(*self._plain(asked._replace(media=in_black(asked.media))))
        updates = updates_of(self._processor, inputs, small)
        if not 0 < num_tokens_of(updates) <= self._max_tokens:
            raise ValueError(f"{num_tokens_of(updates)} placeholders, a prompt has {self._max_tokens} at most")
        if self._is_of_another_size(asked, updates):
            raise ValueError(f"{num_embeds_of(updates)} embeddings, which an image of this size has not")
        return updates, digest_of(record, updates)

    def _is_of_another_size(self, asked: ItemRequest, updates: Sequence[Any]) -> bool:
        """Whether these are not the placeholders of an image of that size, as far as somebody can tell."""
        if not self._may_reckon or asked.arguments or not isinstance(asked.media, KnownImage):
            return False
        reckoned = embeds_by_size(self._processor, asked.media.record.size)
        return reckoned is not None and reckoned != num_embeds_of(updates)

    def _kinds_of(self, modality: str) -> Kinds:
        """What the model's items look like. Raises: LookupError for a model that can't be asked."""
        if modality not in self._kinds:
            try:
                item, updates = process_blank(self._processor, modality, self._max_tokens)
                if modality == "image":
                    reckoned = embeds_by_size(self._processor, (BLANK_PIXELS, BLANK_PIXELS))
                    self._may_reckon = self._may_reckon and reckoned == num_embeds_of(updates)
                self._kinds[modality] = Kinds(
                    item, num_tokens_of(updates), self._max_tokens, patches_of_a_side(self._processor)
                )
            except Exception:  # of a model's own code; nothing is said of its items, then
                logger.debug("mmcache: no records of %ss are kept", modality, exc_info=True)
                self._kinds[modality] = None
        if (kinds := self._kinds[modality]) is None:
            raise LookupError(f"the processor makes nothing of a blank {modality}")
        return kinds

    def _processed(self, asked: ItemRequest, inputs: Any, mm_hash: str) -> Processed:
        """The item as vLLM's processor makes it; once where several requests want it at a time."""
        with self._lock:
            under_way = self._under_way.get(mm_hash)
            if under_way is None:
                mine = self._under_way[mm_hash] = Future()
        if under_way is not None:
            return under_way.result()
        try:
            processed = process(self._processor, asked.modality, asked.media, asked.arguments)
            counters.ITEMS_PROCESSED.add()
            self._keep_record(asked, inputs, mm_hash, processed)
            mine.set_result(processed)
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._under_way[mm_hash]
        return processed

    def _keep_record(self, asked: ItemRequest, inputs: Any, mm_hash: str, processed: Processed) -> None:
        """Of an item that could go without its pixels the next time, and would then be the same."""
        if asked.media.origin is None or not status.is_on("identity"):
            return
        with failsafe("lazy_processing"):
            item, updates = processed
            self._may_reckon = self._may_reckon and not self._is_of_another_size(asked, updates)
            try:
                record = self._kinds_of(asked.modality).describe(item)
            except LookupError:
                return
            restored = None if record is None else self._restored(asked, inputs, record)
            if record is not None and restored is not None and are_equal(restored[1], updates):
                record_store.current().put(self._key(asked.modality, mm_hash), record)
                self.cache.trust(mm_hash)

    def _key(self, modality: str, mm_hash: str) -> bytes:
        return frame.key("item", self._facts, modality, mm_hash)


@contextmanager
def _registered(cache: PreparedItemCache, ready: Iterable[Ready | None]) -> Iterator[None]:
    items = [one for one in ready if one is not None]
    cache.register(items)
    try:
        yield
    finally:
        cache.release(items)


def item_facts(model_config: Any, processor: Any) -> dict[str, str]:
    """All that an item record depends on beside the item's mm_hash; each of them makes another key."""
    # With it off, an mm_hash may be made of what a file says of itself.
    is_by_content = status.is_on("identity")
    return {"format": str(FORMAT), "identity": str(is_by_content), **processor_facts(model_config, processor)}


def may_defer() -> bool:
    """Whether images may go to the engines without pixels: towers seldom need them, and they can be made there."""
    is_on = status.is_on("identity") and status.is_on("features") and status.is_on_everywhere("features")
    return is_on and _are_features_kept(settings.current())


def _are_features_kept(chosen: Settings) -> bool:
    """Whether features have a place by the settings, in RAM or beyond."""
    if chosen.feature_ram_bytes:
        return True
    directory, url = store_places(chosen.store)
    return url is not None or (directory is not None and chosen.store_disk_bytes > 0)


def are_named_by_content(renderer: Any) -> bool:
    """Whether vLLM hashes items at all; where nothing is cached it names them by their request."""
    if renderer.mm_processor is None:
        return False
    return renderer._mm_processor_cache is not None or bool(renderer.config.cache_config.enable_prefix_caching)


def _named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of BaseRenderer._process_multimodal by their names."""
    names = ("prompt", "mm_data", "mm_uuids", "mm_processor_kwargs", "media_io_kwargs")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _put_opened(given: dict[str, Any], opened: Sequence[Any]) -> None:
    """Put the images that came as their files, now opened, in the place of the files."""
    if opened:
        given["mm_data"] = with_opened(given["mm_data"], opened)


def _asked(given: Mapping[str, Any]) -> list[ItemRequest]:
    """What can be made ready of a call of BaseRenderer._process_multimodal with these arguments."""
    found: list[ItemRequest] = []
    arguments = given.get("mm_processor_kwargs") or {}
    for modality, data in given["mm_data"].items():
        items = data if isinstance(data, list) else [data]
        if modality == "video" and len(items) > 1 and _are_per_video(arguments):
            continue
        uuids = (given.get("mm_uuids") or {}).get(modality)
        uuids = uuids if isinstance(uuids, list) else [uuids] * len(items)
        found += [
            ItemRequest(modality, item, name, arguments, given.get("media_io_kwargs") or {})
            for item, name in zip(items, uuids, strict=False)
            if isinstance(item, KnownImage | KnownVideo)
        ]
    return found


def _are_per_video(arguments: Arguments) -> bool:
    """Whether the arguments of a request are lists with a value for each of its videos, as Qwen3-VL takes them."""
    of_videos = arguments.get("videos_kwargs")
    places = [arguments, of_videos] if isinstance(of_videos, Mapping) else [arguments]
    return any(isinstance(place.get(name), list) for place in places for name in ("fps", "num_frames"))
