# SPDX-License-Identifier: Apache-2.0
"""Threads of a rank that use its device. Worker process.

The current CUDA device is each thread's own, and a thread begins on the first one. What a rank does there, be it to
wait for an event, makes a context on the first GPU: about 0.5 GB for each rank of another one.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from vllm_mmcache.base import background


def start_thread(name: str, device: torch.device | None, run: Callable[[], Any]) -> threading.Thread:
    """Start a daemon thread of low priority that calls `run` with `device` as its current one. Any thread.

    device: the rank's; of a CPU, or None, there is nothing to set. All threads of a rank that use its device begin
    here.
    """

    def begin() -> None:
        background.lower_priority()
        if device is not None and device.type == "cuda":
            torch.cuda.set_device(device)
        run()

    thread = threading.Thread(target=begin, name=name, daemon=True)
    thread.start()
    return thread


def on_device(device: torch.device | None) -> AbstractContextManager[object]:
    """A block in which the rank's device is this thread's current one, whosever it is. Any thread."""
    if device is None or device.type != "cuda":
        return nullcontext()
    entered: AbstractContextManager[object] = torch.cuda.device(device)
    return entered
