# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of a tower's weights, taken in a thread of its own. Worker process.

It is unknown at start and whenever weights may have changed, and until it is known no features are used. Reading the
weights takes a second per few gigabytes, in which the model serves. So what was read counts only if nothing changed
from its first byte to its last; and while something changes, or the memory of the weights is away, nothing is read.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from vllm_mmcache.components.features.worker.device_threads import start_thread
from vllm_mmcache.components.features.worker.tower import Tower
from vllm_mmcache.content.digests import inputs_digest, tensors_digest

logger = logging.getLogger("vllm.mmcache")


class Moved(Exception):
    """The weights that are being read have changed, or their memory is going away: what was read does not count."""


class Fingerprints:
    """Fingerprint of each generation of a tower's weights. All but the reading is for the model runner's thread.

    publish: called with (generation, fingerprint) when it is known, and with (generation, "") when it is unknown
    again; one call at a time, in order, from any thread, and it must be short. more: makes the fingerprint of
    the weights' digest, adding what else features depend on.

    On a GPU: not while CUDA graphs are captured, which bears no other thread's copies; `pause` before, or look later.
    """

    def __init__(self, tower: Tower, publish: Callable[[int, str], None], more: Callable[[str], str] = str) -> None:
        self._tower = tower
        self._publish = publish
        self._more = more
        self._generation = 0
        self._settled = -1  # the last generation that needs no reading any more: it was read, or could not be
        self._fingerprint = ""
        self._num_changes = 0  # going on now
        self._is_updating = False  # which is one of them
        self._is_away = False
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._condition = threading.Condition()
        self._device = next((tensor.device for _, tensor in tower.tensors() if tensor.is_cuda), None)
        self._written: Any = None  # event on a GPU: weights of this generation are written
        self._stream: Any = None
        self._record_written_event()
        tower.guard = self.changing

    @property
    def generation(self) -> int:
        """Counted from 0; rises whenever weights may have changed."""
        return self._generation

    @property
    def fingerprint(self) -> str:
        """That of this generation, 64 hex digits as `more` makes them; empty where it is unknown."""
        return self._fingerprint

    def look(self) -> None:
        """Have the fingerprint taken if it is unknown and nobody is at it. Called at every step; costs nothing else."""
        if self._settled == self._generation or self._thread is not None:
            return
        with self._condition:
            if self._thread is None and self._is_wanted():
                self._thread = start_thread("mmcache-weights", self._device, self._run)

    def wait(self, timeout_s: float) -> bool:
        """Whether the fingerprint is known, waiting for it; False after `timeout_s`, or where it can't be taken now."""

        def is_settled() -> bool:
            self.look()
            return self._settled == self._generation or not self._may_read()

        with self._condition:
            return self._condition.wait_for(is_settled, timeout_s) and bool(self._fingerprint)

    def mark_unknown(self) -> None:
        """Weights may have changed: what was known is void, at once. They are not being written now."""
        with self._condition:
            self._generation += 1
            self._fingerprint = ""
            self._record_written_event()
            self._tell()
            self._condition.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Weights are written within: nothing is read meanwhile, and they are unknown from the start and at the end."""
        self._begin_change()
        try:
            yield
        finally:
            self._end_change()

    def begin_update(self) -> None:
        """Weights are written in parts from now on, all of which are one change, to `end_update`; also again."""
        with self._condition:
            is_new, self._is_updating = not self._is_updating, True
        if is_new:
            self._begin_change()

    def end_update(self) -> None:
        """All parts are written, and weights are whole again; nothing where no update was begun."""
        with self._condition:
            was_updating, self._is_updating = self._is_updating, False
        if was_updating:
            self._end_change()

    def _begin_change(self) -> None:
        with self._condition:
            self._num_changes += 1
            self.mark_unknown()
            self._until_let_go()

    def _end_change(self) -> None:
        with self._condition:
            self._num_changes -= 1
            self.mark_unknown()

    def pause(self) -> None:
        """The memory of the weights goes away: returns when nobody reads it, and nobody does until `resume`."""
        with self._condition:
            self._is_away = True
            self._until_let_go()

    def resume(self) -> None:
        """It is there again, with whatever weights."""
        with self._condition:
            if self._is_away:
                self._is_away = False
                self.mark_unknown()

    def close(self) -> None:
        """Read nothing any more; returns when nobody does."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
            self._until_let_go()

    def _is_wanted(self) -> bool:
        return self._settled != self._generation and self._may_read()

    def _may_read(self) -> bool:
        return not (self._num_changes or self._is_away or self._is_closed)

    def _until_let_go(self) -> None:
        self._condition.wait_for(lambda: self._thread is None)

    def _record_written_event(self) -> None:
        """On a GPU: note the point in the model's stream up to which this generation's weights are written."""
        if self._device is not None:
            self._written = torch.cuda.current_stream(self._device).record_event()

    def _tell(self) -> None:
        try:
            self._publish(self._generation, self._fingerprint)
        except Exception:  # the caller's, in the thread that reads or in one that serves
            logger.exception("mmcache could not say which vision weights there are")

    def _run(self) -> None:
        while True:
            with self._condition:
                if not self._is_wanted():
                    self._thread = None
                    self._condition.notify_all()
                    return
                generation, written = self._generation, self._written
            taken, failure = "", None
            try:
                taken = self._take(generation, written)
            except Moved:
                continue
            except Exception as error:  # of the model's or the device's, which must not end the thread's duty
                failure = error
            with self._condition:
                if generation == self._generation and self._may_read():
                    self._settled, self._fingerprint = generation, taken
                    if failure is None:
                        self._tell()
                    else:
                        logger.error(
                            "mmcache could not read the vision weights; no features are used", exc_info=failure
                        )

    def _take(self, generation: int, written: Any) -> str:
        def check() -> None:
            if generation != self._generation or not self._may_read():
                raise Moved

        with self._aside(written):
            here = tensors_digest(self._tower.tensors(), check)
        loaded = "".join(f"{name} {digest}\n" for name, digest in sorted(self._tower.loaded.items()))
        check()
        return self._more(inputs_digest({"loaded": loaded, "here": here}))

    def _aside(self, written: Any) -> AbstractContextManager[object]:
        """On a GPU a stream of our own, so that the model's neither waits for our copies nor is waited for."""
        if self._device is None:
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_event(written)
        entered: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return entered
