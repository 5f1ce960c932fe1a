# SPDX-License-Identifier: Apache-2.0
"""What vLLM's processor made of one item, less its pixels, as a few hundred bytes: an item record.

    msgpack: [FORMAT, {name of a small field: its data}]
    data: a number, {"shape": [sizes], "data": bytes} for a tensor, or a list of these, one level deep

A record holds data alone. Names, dtypes, dimensions and how fields are batched must be those of an item that the
model's own processor has made in this process (`Kinds`), and the placeholders are made anew by vLLM's own code from
these fields and the item's size, so a record can't say anything of them. Whoever can write where records are kept
can't have code run, memory taken or a prompt be longer than the model takes. API server process; pure functions.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import msgspec
import torch
from blake3 import blake3
from msgspec import Meta
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
)
from vllm.multimodal.processing.processor import ResolvedPromptUpdate
from vllm.v1.serial_utils import MsgpackEncoder

from vllm_mmcache.components.lazy_processing.vllm_item import small_fields

FORMAT = 2
"""Of item records, in them and in their key: raise it when what is kept of one means something else."""
MAX_BYTES = 32 * 1024  # of a record; a long video's times are its longest
MAX_FIELDS = 32
MAX_DIMENSIONS = 8
MAX_LENGTH = 8192  # of a list, such as the times of a video's frames
MAX_NUMBER = 1e9  # of what is no integer: seconds, frames a second

_MOST_TOKENS = 1 << 22  # that vLLM is asked to write down for an item before they are counted
_MARGIN = 16  # times the longest prompt, since fields say only about how many tokens there will be
_FEW_COLUMNS = 4  # rows of a field with so few are sizes: frames, height, width
_INLINE = 1 << 20  # vLLM's encoder puts no tensor of a small field into a buffer of its own
_DTYPES = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}) | frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)
_FIELDS = (MultiModalBatchedField, MultiModalFlatField, MultiModalSharedField)

Updates = Sequence[ResolvedPromptUpdate]


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    shape: Annotated[list[Annotated[int, Meta(ge=0, le=1 << 20)]], Meta(max_length=MAX_DIMENSIONS)]
    data: bytes


_One = _Tensor | int | float
_Data = _One | Annotated[list[_One], Meta(max_length=MAX_LENGTH)]


class _Record(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)]
    fields: Annotated[dict[str, _Data], Meta(max_length=MAX_FIELDS)]


_DECODER = msgspec.msgpack.Decoder(_Record)  # without a hook for extension types: each is an error


class Kinds:
    """What the small fields of a model's items look like, by an item that its own processor has made.

    num_tokens are that item's placeholders, max_tokens the longest prompt of the model. merge: patches that a token
    has along each side, of models with grids of patches.
    """

    def __init__(self, item: MultiModalKwargsItem, num_tokens: int, max_tokens: int, merge: int = 1) -> None:
        self._item = item
        self._needed = frozenset(name for name, elem in item.items() if elem.field.keep_on_cpu)
        self._num_tokens = max(1, num_tokens)
        self._merge = merge
        self._sizes = {name: _size(elem.data) for name, elem in item.items()}
        self.max_tokens = max_tokens
        """Of a prompt."""

    def restore(self, record: bytes, *, is_known: bool = False) -> MultiModalKwargsItem:
        """The small fields of item 0. Raises: ValueError or TypeError for what is no record of such an item.

        is_known: these very bytes were restored before, so that how they are written and their sizes are right.
        """
        if len(record) > MAX_BYTES:
            raise ValueError(f"{len(record)} bytes, an item record has {MAX_BYTES} at most")
        found = _DECODER.decode(record).fields
        if lacking := self._needed - found.keys():
            raise ValueError(f"no {', '.join(sorted(lacking))}")
        if unknown := found.keys() - self._item.keys():
            raise ValueError(f"a field {min(unknown)[:80]!r}, which this model's items don't have")
        small = {name: self._restored(found[name], elem) for name, elem in self._item.items() if name in found}
        item = MultiModalKwargsItem(small)
        if not is_known:
            self._check_sizes(small)
            if encode(item) != record:
                raise ValueError("not written as records are")
        return item

    def describe(self, item: MultiModalKwargsItem) -> bytes | None:
        """The record of an item; None where there can be none: nothing in it is large, or it can't be said exactly."""
        small = small_fields(item)
        if len(small) == len(item):
            return None
        try:
            record = encode(small)
            found = self.restore(record)
            # How fields are batched, too, as it arrives in the engine.
            is_same = bool(found == small) and _as_sent(found) == _as_sent(small)
        except (TypeError, ValueError, AttributeError):
            return None
        return record if is_same else None

    def _restored(self, data: Any, like: MultiModalFieldElem) -> MultiModalFieldElem:
        if type(like.field) not in _FIELDS:
            raise ValueError(f"fields of an unknown kind, {type(like.field).__name__}")
        restored = _restored(data, like.data)
        field = like.field
        if isinstance(field, MultiModalFlatField):
            length = len(restored) if isinstance(restored, list) else restored.shape[field.dim]
            last = slice(0, length)
            first = field.slices[0]
            whole = last if isinstance(first, slice) else (*first[:-1], last)
            field = replace(field, slices=[whole])
        return MultiModalFieldElem(data=restored, field=field)

    def _check_sizes(self, small: dict[str, MultiModalFieldElem]) -> None:
        """Whether about as many tokens follow from the sizes as a prompt can have: vLLM's code writes them down first.

        Raises: ValueError.
        """
        grown = math.prod(max(1.0, _size(elem.data) / max(1.0, self._sizes[name])) for name, elem in small.items())
        if self._num_tokens * grown > max(_MOST_TOKENS, _MARGIN * self.max_tokens):
            raise ValueError("sizes of an item that no prompt of this model can hold")
        for name, elem in small.items():
            # Models round in more than one way what is no whole number of tokens, and would disagree with themselves.
            if name.endswith("grid_thw") and isinstance(elem.data, torch.Tensor):
                sizes = elem.data.flatten().tolist()
                if min(sizes, default=0) < 1 or any(side % self._merge for side in sizes[1::3] + sizes[2::3]):
                    raise ValueError(f"a grid of {sizes} patches, {self._merge} to a side of a token")


def encode(small: MultiModalKwargsItem) -> bytes:
    """Small fields as a record. Raises: TypeError, ValueError for data that none can hold."""
    return msgspec.msgpack.encode(_Record(FORMAT, {name: _told(elem.data) for name, elem in sorted(small.items())}))


def digest_of(record: bytes, updates: Updates) -> bytes:
    """Digest of what a record says of an item, and of the placeholders that follow; 32 bytes."""
    placeholders = [
        (update.modality, content.full, content.is_embed and content.is_embed(content.full).tolist())
        for update in updates
        for content in (update.content,)
    ]
    return blake3(record + msgspec.msgpack.encode(placeholders)).digest()


def num_tokens_of(updates: Updates) -> int:
    """How many placeholder tokens an item has."""
    return sum(len(update.content.full) for update in updates)


def num_embeds_of(updates: Updates) -> int:
    """How many of them get an embedding of the item's."""
    contents = [update.content for update in updates]
    return sum(len(one.full) if one.is_embed is None else int(one.is_embed(one.full).sum()) for one in contents)


def are_equal(some: Updates, others: Updates) -> bool:
    """Whether two processors' placeholders are the same."""
    return len(some) == len(others) and all(map(_are_equal, some, others))


def _are_equal(one: ResolvedPromptUpdate, other: ResolvedPromptUpdate) -> bool:
    first, second = one.content, other.content
    if (one.modality, one.mode, one.target, first.full) != (other.modality, other.mode, other.target, second.full):
        return False
    if first.is_embed is None or second.is_embed is None:
        return first.is_embed is second.is_embed
    return bool(torch.equal(first.is_embed(first.full), second.is_embed(second.full)))


def _as_sent(small: MultiModalKwargsItem) -> list[bytes]:
    return [bytes(part) for part in MsgpackEncoder(size_threshold=_INLINE).encode(small)]


def _told(data: Any, depth: int = 1) -> Any:
    """Raises: TypeError for what a record can't hold."""
    if isinstance(data, torch.Tensor):
        if not data.numel():
            return _Tensor(list(data.shape), b"")
        flat = data.detach().cpu().contiguous().flatten()
        return _Tensor(list(data.shape), flat.view(torch.uint8).numpy().tobytes())
    if isinstance(data, list | tuple) and depth:
        return [_told(one, depth - 1) for one in data]
    if type(data) not in (int, float):
        raise TypeError(f"{type(data).__name__} in a field of an item")
    return data


def _restored(data: Any, like: Any) -> Any:
    """`data` of a record, of the kind that the model's own item has. Raises: ValueError."""
    if isinstance(like, list | tuple):
        if not isinstance(data, list) or (data and not like):
            raise ValueError("no list, or one of things unknown")
        return [_restored(one, like[0]) for one in data]
    if not isinstance(like, torch.Tensor):
        if type(data) is not type(like) or not abs(data) <= MAX_NUMBER:
            raise ValueError(f"{type(data).__name__}, expected a {type(like).__name__} up to {MAX_NUMBER:.0e}")
        return data
    if not isinstance(data, _Tensor) or len(data.shape) != like.ndim or like.dtype not in _DTYPES:
        raise ValueError(f"no tensor of {like.ndim} dimensions")
    if math.prod(data.shape) * like.itemsize != len(data.data):
        raise ValueError(f"{len(data.data)} bytes for {data.shape} of {like.dtype}")
    if not data.data:
        return torch.empty(data.shape, dtype=like.dtype)
    if like.dtype is torch.bool and max(data.data) > 1:
        raise ValueError("neither true nor false")
    tensor = torch.frombuffer(bytearray(data.data), dtype=like.dtype).view(data.shape)  # writable, as torch wants it
    if tensor.is_floating_point() and not bool((tensor.abs() <= MAX_NUMBER).all()):  # false for NaN, too
        raise ValueError(f"no numbers up to {MAX_NUMBER:.0e}")
    return tensor


def _size(data: Any) -> float:
    """How much of an image or a video the integers in a field's data may stand for: rows of a few are sizes."""
    if isinstance(data, list | tuple):
        return sum(map(_size, data))
    if isinstance(data, torch.Tensor):
        if data.is_floating_point() or data.dtype is torch.bool or not data.numel():
            return 0.0
        values, columns = data.flatten().tolist(), data.shape[-1] if data.ndim else 1
        if columns > _FEW_COLUMNS:
            return math.fsum(map(abs, values))
        rows = (values[start : start + columns] for start in range(0, len(values), columns))
        return math.fsum(float(abs(math.prod(row))) for row in rows)
    return float(abs(data)) if isinstance(data, int) else 0.0
