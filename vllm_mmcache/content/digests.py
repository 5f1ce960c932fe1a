# SPDX-License-Identifier: Apache-2.0
"""Digests that say what features depend on: the bytes that go into the tower, and the weights that it has.

A feature is a function of exactly these, so two that agree in them have equal features, whatever a client calls its
image. Runs in the worker: inputs per image (4 ms for a megapixel), weights in a thread of their own
(components/features/worker/weights.py). BLAKE3 throughout: what two tenants can meet on must not rest on a hash that
can be steered.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from blake3 import blake3

PIECE_BYTES = 64 * 1024**2
"""So much of a tensor is brought to the CPU at a time."""


def inputs_digest(inputs: Mapping[str, Any]) -> str:
    """Digest of everything that the processor made of one image: pixels, grid, sizes.

    Shapes: tensors of any shape on any device, or nested lists of them.
    """
    digest = blake3()
    for name in sorted(inputs):
        _put(digest, name, inputs[name])
    return digest.hexdigest()


def canonical_text(value: Any) -> str:
    """A value of a configuration as text, the same for equal values, for `inputs_digest`."""
    return json.dumps(value, sort_keys=True, default=str)


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]], check: Callable[[], None] = lambda: None) -> str:
    """Digest of named tensors, such as the parameters and buffers of the tower; any device, in any order.

    `check` is called before each tensor and before each piece of one; what it raises ends the work. On a GPU, pieces
    are copied on the current stream, and the caller waits for that stream alone.
    """
    digest = blake3()  # in one thread: requests are served meanwhile
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        check()
        _put(digest, name, tensor, check)
    return digest.hexdigest()


def _put(digest: Any, name: str, value: Any, check: Callable[[], None] = lambda: None) -> None:
    if isinstance(value, torch.Tensor):
        _head(digest, name, f"{value.dtype} {tuple(value.shape)}")
        if value.numel():
            for piece in value.detach().contiguous().reshape(-1).view(torch.uint8).split(PIECE_BYTES):
                check()
                digest.update(piece.to("cpu").numpy())
    elif isinstance(value, list | tuple):
        _head(digest, name, f"{len(value)} values")
        for part in value:
            _put(digest, "", part)
    else:
        _head(digest, name, repr(value))


def _head(digest: Any, name: str, kind: str) -> None:
    for text in (name, kind):
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
