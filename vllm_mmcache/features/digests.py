# SPDX-License-Identifier: Apache-2.0
"""Digests that say what features depend on: the bytes that go into the tower, and the weights that it has.

A feature is a function of exactly these, so two that agree in them have equal features, whatever a client calls its
image. Runs in the worker: inputs per image (4 ms for a megapixel), weights at start and after an update. BLAKE3
throughout: what two tenants can meet on must not rest on a hash that can be steered.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from blake3 import blake3


def inputs_digest(inputs: Mapping[str, Any]) -> str:
    """Digest of everything that the processor made of one image: pixels, grid, sizes.

    Shapes: tensors of any shape on any device, or nested lists of them.
    """
    digest = blake3()
    for name in sorted(inputs):
        _put(digest, name, inputs[name])
    return digest.hexdigest()


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Digest of named tensors, such as the parameters and buffers of the tower; any device, in any order."""
    digest = blake3(max_threads=blake3.AUTO)
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        _put(digest, name, tensor)
    return digest.hexdigest()


def _put(digest: Any, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        _head(digest, name, f"{value.dtype} {tuple(value.shape)}")
        plain = value.detach().to("cpu").contiguous()
        if plain.numel():
            digest.update(plain.reshape(-1).view(torch.uint8).numpy())
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
