# SPDX-License-Identifier: Apache-2.0
"""Makes the pixels of deferred items with vLLM's own loader and processor. Engine and worker processes, any thread."""

import copy
import logging
import threading
import time
from typing import Any

from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.tokenizers import cached_tokenizer_from_config, maybe_make_thread_pool

from vllm_mmcache.components.lazy_media import vllm_source
from vllm_mmcache.components.lazy_processing.vllm_item import is_deferred, small_fields, undo
from vllm_mmcache.components.lazy_processing.vllm_item_record import digest_of, encode
from vllm_mmcache.components.lazy_processing.vllm_processor import process, process_blank
from vllm_mmcache.metrics import counters

logger = logging.getLogger("vllm.mmcache")


class Refuted(ValueError):
    """An item is not what its record says."""


class PixelMaker:
    """One process's. vLLM's own parts of the processor are shared with what vLLM has made of it already."""

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config
        self._processor: Any = None
        self._lock = threading.Lock()

    def make(self, item: MultiModalKwargsItem) -> MultiModalKwargsItem:
        """The item that the API server's processor would have made.

        Raises: Refuted where its record was not its own; what vLLM raises for broken bytes.
        """
        made, is_as_recorded = self._make(item)
        if not is_as_recorded:
            raise Refuted("the processor makes something else of it than its record says")
        return made

    def complete(self, item: MultiModalKwargsItem) -> tuple[MultiModalKwargsItem, bool]:
        """The same for an item that must have its pixels now, in a step, and whether it is as it was recorded.

        One that has them is as it was. Where nobody can make them it is a blank one: a step must not fail.
        """
        if not is_deferred(item):
            return item, True
        start = time.perf_counter()
        try:
            made, is_as_recorded = self._make(item)
        except Exception as error:  # of vLLM's loader or of a model's processor
            logger.error("mmcache: the model is shown a blank image, since the pixels of one can't be made: %s", error)
            processor = self._processor_here()
            made, _ = process_blank(processor, undo(item)[0], self._model_config.max_model_len)
            is_as_recorded = False
        counters.PIXELS_MADE_LATE.add()
        counters.PIXELS_LATE_SECONDS.add(time.perf_counter() - start)
        return made, is_as_recorded

    def _make(self, item: MultiModalKwargsItem) -> tuple[MultiModalKwargsItem, bool]:
        modality, opened, arguments, digest = undo(item)
        made, updates = process(self._processor_here(), modality, vllm_source.load(opened), arguments)
        counters.PIXELS_MADE.add()
        return made, digest_of(encode(small_fields(made)), updates) == digest

    def _processor_here(self) -> Any:
        with self._lock:
            if self._processor is None:
                # Some processors ask it for the tokens of a text; it is used by vLLM's own threads, too.
                tokenizer = maybe_make_thread_pool(copy.copy(cached_tokenizer_from_config(self._model_config)))
                self._processor = MULTIMODAL_REGISTRY.create_processor(self._model_config, tokenizer=tokenizer)
            return self._processor
