# SPDX-License-Identifier: Apache-2.0
"""What the checks ask of an engine's workers. Worker process; with one worker that is the engine's own.

Each function gets vLLM's worker first, and is sent by its name: `Rig.in_workers(workers.spoil_kv)`.
"""

from collections.abc import Iterator
from typing import Any


def spoil_kv(worker: Any) -> int:
    """Change every value in this worker's KV cache. Returns the number of tensors; 0 where it shows none."""
    found = list(_tensors(getattr(worker.model_runner, "kv_caches", None)))
    for tensor in found:
        if tensor.is_floating_point() and tensor.element_size() > 1:
            tensor.mul_(-2)
        else:  # quantised: the bytes of other numbers
            tensor.zero_()
    return len(found)


def _tensors(held: Any) -> Iterator[Any]:
    import torch

    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, list | tuple):
        for one in held:
            yield from _tensors(one)
