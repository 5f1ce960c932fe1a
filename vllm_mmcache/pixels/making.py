# SPDX-License-Identifier: Apache-2.0
"""Makes the pixels of deferred items with vLLM's own loader and processor. Engine and worker processes, any thread."""

import copy
import threading
import time
from typing import Any

from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.tokenizers import cached_tokenizer_from_config, maybe_make_thread_pool

from vllm_mmcache.lazy_media import origin
from vllm_mmcache.metrics import counters
from vllm_mmcache.pixels.item import is_deferred, small_fields, undo
from vllm_mmcache.pixels.processing import process
from vllm_mmcache.pixels.record import digest_of, encode


class Refuted(ValueError):
    """An item is not what its record says."""


class Maker:
    """One process's. vLLM's own parts of the processor are shared with what vLLM has made of it already."""

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config
        self._processor: Any = None
        self._lock = threading.Lock()

    def make(self, item: MultiModalKwargsItem) -> MultiModalKwargsItem:
        """The item that the API server's processor would have made.

        Raises: Refuted where its record was not its own; what vLLM raises for broken bytes.
        """
        modality, opened, arguments, digest = undo(item)
        made, updates = process(self._processor_here(), modality, origin.load(opened), arguments)
        counters.PIXELS_MADE.add()
        if digest_of(encode(small_fields(made)), updates) != digest:
            raise Refuted(f"the processor makes something else of this {modality} than its record says")
        return made

    def complete(self, item: MultiModalKwargsItem) -> MultiModalKwargsItem:
        """The same for an item that must have its pixels now, in a step; one that has them is as it was."""
        if not is_deferred(item):
            return item
        start = time.perf_counter()
        made = self.make(item)
        counters.PIXELS_MADE_LATE.add()
        counters.PIXELS_LATE_SECONDS.add(time.perf_counter() - start)
        return made

    def _processor_here(self) -> Any:
        with self._lock:
            if self._processor is None:
                # Some processors ask it for the tokens of a text; it is used by vLLM's own threads, too.
                tokenizer = maybe_make_thread_pool(copy.copy(cached_tokenizer_from_config(self._model_config)))
                self._processor = MULTIMODAL_REGISTRY.create_processor(self._model_config, tokenizer=tokenizer)
            return self._processor
