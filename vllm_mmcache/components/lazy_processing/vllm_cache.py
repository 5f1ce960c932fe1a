# SPDX-License-Identifier: Apache-2.0
"""vLLM's processor cache with what is ready beside it. API server process; any thread lends, vLLM's one thread takes.

vLLM asks which items are cached, and processes the others in its one thread. Here an item that is ready counts as
cached, and goes into vLLM's own cache when its turn comes, so that the order there, which the engine mirrors, stays
vLLM's. An item that is ready no longer is processed as it always was.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

from vllm.multimodal.cache import BaseMultiModalProcessorCache
from vllm.multimodal.cache.shm import ShmObjectStoreSenderCache
from vllm.utils.cache import CacheInfo

from vllm_mmcache.base.lru import Size
from vllm_mmcache.components.lazy_processing.vllm_item import is_deferred
from vllm_mmcache.components.lazy_processing.vllm_processor import Processed
from vllm_mmcache.content import tokens_alone
from vllm_mmcache.metrics import counters, table_sizes

MAX_REFUTED = 4096  # names that are remembered
MOST_MODALITIES = 4  # of a request, for each of which vLLM asks once what is cached

Ready = tuple[str, Processed]
"""An item's mm_hash, and the item."""


class _Promised(threading.local):
    """What this thread's vLLM was told to be cached, by its last questions; the request that lent it may be through."""

    def __init__(self) -> None:
        self.by_question: deque[dict[str, Processed]] = deque(maxlen=MOST_MODALITIES)

    def get(self, mm_hash: str) -> Processed | None:
        """The item of this name, if it was promised."""
        return next((items[mm_hash] for items in reversed(self.by_question) if mm_hash in items), None)


class PreparedItemCache(BaseMultiModalProcessorCache):  # type: ignore[misc]
    """vLLM's cache, or nothing where vLLM has none, and what is ready; to vLLM it is one cache."""

    def __init__(self, cache: BaseMultiModalProcessorCache | None) -> None:
        self._cache = cache
        # The engine would be sent an address, and not see that there are no pixels.
        self._hides_items = isinstance(cache, ShmObjectStoreSenderCache)
        self._lock = threading.Lock()
        self._registered: dict[str, tuple[int, Processed]] = {}  # mm_hash -> by how many requests, and the item
        self._promised = _Promised()
        self._refuted: OrderedDict[str, None] = OrderedDict()
        self._show_size()

    def register(self, items: Iterable[Ready]) -> None:
        """Have items ready, until each is taken back."""
        with self._lock:
            for mm_hash, processed in items:
                count, former = self._registered.get(mm_hash, (0, processed))
                self._registered[mm_hash] = count + 1, former

    def release(self, items: Iterable[Ready]) -> None:
        """The request that lent them is through."""
        with self._lock:
            for mm_hash, _ in items:
                count, processed = self._registered.pop(mm_hash)
                if count > 1:
                    self._registered[mm_hash] = count - 1, processed

    def registered(self, mm_hash: str) -> Processed | None:
        """What some request has ready under this name."""
        return self._registered.get(mm_hash, (0, None))[1]

    def size(self) -> Size:
        """How many items are ready; requests in flight bound them."""
        return Size(len(self._registered))

    def _show_size(self) -> None:
        table_sizes.of_server("pixels_ready", self.size)

    def is_kept(self, mm_hash: str) -> bool:
        """Whether vLLM's own cache has an item. Any thread."""
        return self._cache is not None and self._cache.is_cached_item(mm_hash)

    def is_refuted(self, mm_hash: str) -> bool:
        """Whether an engine could do nothing with this item, so that its record is not to be trusted."""
        return mm_hash in self._refuted

    def trust(self, mm_hash: str) -> None:
        """The item was processed anew, and its record is another one now."""
        with self._lock:
            self._refuted.pop(mm_hash, None)

    # vLLM's interface

    def is_cached_item(self, mm_hash: str) -> bool:
        """Whether vLLM's cache has it, or it is ready."""
        return self.is_kept(mm_hash) or self.registered(mm_hash) is not None

    def is_cached(self, mm_hashes: list[str]) -> list[bool]:
        """The same for the items of one modality. What is ready can then be had until `release_sender_touches`.

        vLLM does not call that where a request ends with an error; then it is until it has asked some times more.
        """
        ready = {name: item for name in mm_hashes if (item := self.registered(name)) is not None}
        self._promised.by_question.append(ready)
        return [name in ready or self.is_kept(name) for name in mm_hashes]

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        """As vLLM's; where the caller has nothing (None), with what is ready, which goes into vLLM's cache now."""
        if mm_item is not None:
            if mm_item[1]:  # what comes ready-made from clients changes no prompt
                counters.ITEMS_PROCESSED.add()
        elif not self.is_kept(mm_hash):
            mm_item = self._promised.get(mm_hash) or self.registered(mm_hash)
        if self._cache is None or (mm_item is not None and is_deferred(mm_item[0]) and self._hides_items):
            assert mm_item is not None, f"Expected a cached item for {mm_hash=}"
            return mm_item
        return self._cache.get_and_update_item(mm_item, mm_hash)

    def touch_sender_cache_item(self, mm_hash: str) -> None:
        """Passed on to vLLM's cache, if there is one; what is lent is not in it."""
        if self._cache is not None:
            self._cache.touch_sender_cache_item(mm_hash)

    def release_sender_touches(self) -> None:
        """The items of a request are merged. Passed on to vLLM's cache, if there is one."""
        self._promised.by_question.clear()
        if self._cache is not None:
            self._cache.release_sender_touches()

    def validate_input_item(self, mm_item: Any, mm_hash: str) -> None:
        """As vLLM's, for items that clients send ready-made. Raises: ValueError for one without pixels, too."""
        if is_deferred(mm_item):
            raise ValueError("An item must have its pixels; one without is this server's own.")
        if self._cache is not None:
            self._cache.validate_input_item(mm_item, mm_hash)

    def invalidate(self, mm_hash: str) -> None:
        """Passed on to vLLM's cache, if there is one; what is lent stays. Its record is not used again as it is."""
        with self._lock:
            self._refuted[mm_hash] = None
            if len(self._refuted) > MAX_REFUTED:
                self._refuted.popitem(last=False)
        if self._cache is not None:
            self._cache.invalidate(mm_hash)

    def clear_cache(self) -> None:
        """Passed on to vLLM's cache, if there is one; what is lent stays."""
        if self._cache is not None:
            self._cache.clear_cache()

    def make_stats(self, *, delta: bool = False) -> CacheInfo:
        """Those of vLLM's cache; zeros without one."""
        return CacheInfo(hits=0, total=0) if self._cache is None else self._cache.make_stats(delta=delta)

    def close(self) -> None:
        """Passed on to vLLM's cache, if there is one."""
        if self._cache is not None:
            self._cache.close()


class TokensCache(PreparedItemCache):
    """The cache of requests that no engine sees: vLLM's own, and, for those that want tokens alone, what is ready.

    Other such requests share vLLM's cache and want pixels, so they see nothing of what is ready, and no item without
    pixels goes into it.
    """

    def __init__(self, cache: BaseMultiModalProcessorCache) -> None:
        super().__init__(cache)
        self._hides_items = True

    def registered(self, mm_hash: str) -> Processed | None:
        """What some request has ready under this name; None for a request that wants more than tokens."""
        return super().registered(mm_hash) if tokens_alone.ASKED.get() else None

    def _show_size(self) -> None:
        table_sizes.of_server("tokens_ready", self.size)
