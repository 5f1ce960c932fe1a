# SPDX-License-Identifier: Apache-2.0
"""A deferred item: what vLLM's processor made of an image or a video, with the encoded bytes in place of the pixels.

To vLLM's caches and serialisers it is an item like any other. API server process makes them; engine and workers look
into them.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

from vllm_mmcache.components.lazy_media.vllm_source import MediaSource

FIELD = "mmcache_deferred"
"""Name of the field that is there instead: two tensors of uint8, a header as JSON and the encoded bytes."""
SMALL_BYTES = 1024
"""Fields up to here stay in a deferred item, as do those that vLLM keeps on the CPU: positions depend on them."""

Arguments = Mapping[str, object]
"""The request's own arguments for the processor (mm_processor_kwargs)."""


def is_deferred(item: Any) -> bool:
    """Whether an item has no pixels yet; False for None."""
    return item is not None and FIELD in item


def small_fields(item: MultiModalKwargsItem) -> MultiModalKwargsItem:
    """The fields of an item that stay in a deferred one."""
    return MultiModalKwargsItem({name: elem for name, elem in item.items() if _stays(elem)})


def defer(
    small: MultiModalKwargsItem, modality: str, origin: MediaSource, arguments: Arguments, digest: bytes
) -> MultiModalKwargsItem:
    """The deferred item of an image or a video. Raises: TypeError where the arguments are not plain JSON.

    digest: of what the processor must say of it when its pixels are made (vllm_item_record.py).
    """
    opened = {"kind": origin.kind, "options": origin.options, "is_text": origin.is_text}
    header = {"modality": modality, "origin": opened, "arguments": dict(arguments), "digest": digest.hex()}
    text = json.dumps(header)
    if json.loads(text) != header:
        raise TypeError("what the processor is told is not the same when it has been JSON")
    tensors = [_tensor(text.encode()), _tensor(origin.content())]
    field = MultiModalFieldElem(data=tensors, field=MultiModalBatchedField())
    return MultiModalKwargsItem({**small, FIELD: field})


def undo(item: MultiModalKwargsItem) -> tuple[str, MediaSource, Arguments, bytes]:
    """The modality, origin, arguments and digest of a deferred item."""
    header_tensor, content = item[FIELD].data
    header = json.loads(header_tensor.numpy().tobytes())
    origin = MediaSource(content=lambda: content.numpy().tobytes(), **header["origin"])
    return header["modality"], origin, header["arguments"], bytes.fromhex(header["digest"])


def _stays(elem: MultiModalFieldElem) -> bool:
    return elem.field.keep_on_cpu or _num_bytes(elem.data) <= SMALL_BYTES


def _tensor(content: bytes) -> torch.Tensor:
    # A view of bytes that nobody writes to; torch warns of that where it is made from them directly.
    return torch.from_numpy(np.frombuffer(bytearray(content), dtype=np.uint8))


def _num_bytes(data: Any) -> int:
    """Of a field's data; numbers are small."""
    if isinstance(data, torch.Tensor):
        return int(data.nbytes)
    if isinstance(data, list | tuple):
        return sum(map(_num_bytes, data))
    return 8
