# SPDX-License-Identifier: Apache-2.0
"""Pixels of images of requests that wait, made by threads of the engine beside its steps. Engine process."""

import time
import weakref
from concurrent.futures import Future
from typing import Any

from vllm_mmcache.base import background
from vllm_mmcache.base.estimate import Estimate
from vllm_mmcache.base.worker_threads import Threads
from vllm_mmcache.components.lazy_processing.vllm_pixels import PixelMaker
from vllm_mmcache.components.lazy_processing.vllm_processor import use_one_core

MOST_THREADS = 4
MOST_AHEAD = 32
"""Items whose pixels are made when their request arrives; of more, when it is their turn, since pixels are large."""

PixelFuture = Future[Any]
"""One item, with its pixels when it is done."""


class Pixels:
    """The pixels that an engine makes. Scheduler's thread."""

    def __init__(self, model_config: Any) -> None:
        self._maker = PixelMaker(model_config)
        self._threads = Threads("pixels", background.busy_thread_limit(MOST_THREADS))
        self._estimate = Estimate()
        self._kept = weakref.WeakValueDictionary[str, PixelFuture]()

    @property
    def may_begin_ahead(self) -> bool:
        """Whether requests that wait hold so few pixels that those of one more can be made before its turn."""
        return len(self._kept) < MOST_AHEAD

    def begin(self, item: Any, num_tokens: int, name: str) -> PixelFuture | None:
        """Have the pixels of a deferred item made, once for all who ask while one of them has them; never waits.

        name: what the item is called, whoever brings it. The future holds what vLLM raised where nobody can make them.
        Returns None where too many wait: then it is to be asked again.
        """
        under_way = self._kept.get(name)
        if under_way is not None and not (under_way.done() and under_way.exception() is not None):
            return under_way
        making = PixelFuture()

        def make() -> None:
            start = time.perf_counter()
            try:
                use_one_core()
                made = self._maker.make(item)
            except Exception as error:  # of vLLM's loader or of a model's processor: nobody can make them
                making.set_exception(error)
            else:
                self._estimate.add(num_tokens, time.perf_counter() - start)
                making.set_result(made)

        if not self._threads.submit(make):
            return None
        self._kept[name] = making
        return making

    def seconds(self, num_tokens: int) -> float | None:
        """Seconds that the pixels of so many tokens take to make; None while nobody has made any."""
        return self._estimate.seconds(num_tokens)

    def close(self) -> None:
        """Make no more."""
        self._threads.close()
