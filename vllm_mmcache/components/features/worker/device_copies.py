# SPDX-License-Identifier: Apache-2.0
"""Copies between the arena and a rank's device that its steps do not wait for. Worker process.

On CUDA: a stream of their own, from and to memory that is pinned; the model's stream waits for what it will use, the
CPU for nothing. On the CPU: features are copied in at once, since the step needs them, and out in a thread. A thread
also says on the board what is done.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from vllm_mmcache.base import background
from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.message import SEAL_BYTES, SlotRef

logger = logging.getLogger("vllm.mmcache")


class Unpinnable(Exception):
    """The arena can't be pinned for the device, in words."""


class DeviceCopies:
    """Copies of one rank. One thread, the model runner's.

    row: the rank's on the arena's board; the rank of the first one alone saves.
    Raises: Unpinnable, also for a device that is neither a CPU nor CUDA's.
    """

    def __init__(self, arena: Arena, row: int, device: torch.device) -> None:
        self._arena = arena
        self._row = arena.board[row : row + 1]
        self._saves = row == 0
        self._device = device
        self._stream: Any = None
        self._address = 0  # of what is pinned
        if device.type == "cuda":
            self._address = _pin(arena.buffer(0, arena.num_bytes))
            self._stream = torch.cuda.Stream(device)
        elif device.type != "cpu":
            raise Unpinnable(f"not written for a device of type {device.type}")
        self._done: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mmcache-copies", daemon=True)
        self._thread.start()

    @property
    def is_asynchronous(self) -> bool:
        """Whether the device goes on by itself, so that only its own events tell the time."""
        return self._stream is not None

    def load(self, places: Sequence[SlotRef]) -> list[torch.Tensor]:
        """Features on the device, as the model's stream will find them.

        Shapes: (num_tokens, width) each, of its place's dtype.
        """
        if not places:
            return []
        last = places[-1].number
        if self._stream is None:
            found = [self._features(place).clone() for place in places]
            self.then(lambda: self._say("loads_done", last))
            return found
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            found = [self._features(place).to(self._device, non_blocking=True) for place in places]
            copied = self._stream.record_event()
        current.wait_event(copied)
        for features in found:
            features.record_stream(current)

        def say() -> None:
            copied.synchronize()
            self._say("loads_done", last)

        self.then(say)
        return found

    def save(self, place: SlotRef, features: torch.Tensor | None) -> None:
        """Put what the tower gave into the arena, behind what the model's stream does now; None says there is nothing.

        The first rank alone does: others come later, when what it saved is in use.
        Shapes: features (num_tokens, width) of the place's dtype, on the device; must not be written into afterwards.
        """
        if not self._saves:
            return
        if features is None:
            self.then(lambda: self._say("saves_done", place.number))
            return
        if self._stream is None:
            # Not torch: a thread that enters OpenMP has a team of its own, and with more threads than cores libgomp's
            # no longer spin, which makes every step of the model slower by half.
            source = features.contiguous().view(-1).view(torch.uint8).numpy()
            target = np.frombuffer(self._arena.buffer(place.offset, place.shape.num_bytes), np.uint8)
            self.then(lambda: self._seal(place, lambda: np.copyto(target, source)))
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._features(place).copy_(features, non_blocking=True)
            copied = self._stream.record_event()
        features.record_stream(self._stream)
        self.then(lambda: self._seal(place, copied.synchronize))

    def skip(self, places: Sequence[SlotRef]) -> None:
        """These are not wanted after all."""
        if places:
            last = places[-1].number
            self.then(lambda: self._say("loads_done", last))

    def then(self, job: Callable[[], Any]) -> None:
        """Do something in the thread, after all copies so far were seen to be done; what it raises is logged."""
        self._done.put(job)

    def flush(self) -> None:
        """Wait until all copies so far are done, but no longer than 60 s."""
        reached = threading.Event()
        self.then(reached.set)
        reached.wait(60)

    def let_go(self) -> None:
        """Wait for the copies, and unpin the arena, which is not read or written any more; the thread goes on."""
        self.flush()
        self._unpin()

    def close(self) -> None:
        """Wait for the copies, no longer than 5 s, and end the thread."""
        self._done.put(None)
        self._thread.join(5)
        self._unpin()

    def _unpin(self) -> None:
        address, self._address = self._address, 0
        if address:
            torch.cuda.cudart().cudaHostUnregister(address)

    def _features(self, place: SlotRef) -> torch.Tensor:
        shape = place.shape
        flat = torch.frombuffer(self._arena.buffer(place.offset, shape.num_bytes), dtype=getattr(torch, shape.dtype))
        return flat.view(shape.num_tokens, shape.width)

    def _seal(self, place: SlotRef, copy: Callable[[], Any]) -> None:
        try:
            copy()
            seal = self._arena.buffer(place.offset + place.shape.num_bytes, SEAL_BYTES)
            seal[:] = place.number.to_bytes(SEAL_BYTES, "little")
        finally:  # without a seal it is not kept
            self._say("saves_done", place.number)

    def _say(self, field: str, number: int) -> None:
        self._row[field] = number

    def _run(self) -> None:
        background.lower_priority()
        if self._stream is not None:  # or waiting for an event makes a context on the first device
            torch.cuda.set_device(self._device)
        while (job := self._done.get()) is not None:
            try:
                with torch.inference_mode():
                    job()
            except Exception:
                logger.exception("mmcache: a copy of features failed; what it was for is not used")
            job = None


def _pin(memory: memoryview) -> int:
    """Register memory with the device, whole, so that copies of it need no thread that waits; returns its address."""
    address: int = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    code = torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, 0)
    if int(code) != 0:
        raise Unpinnable(f"{memory.nbytes} bytes can't be pinned (cudaHostRegister gave {int(code)})")
    return address
