# SPDX-License-Identifier: Apache-2.0
"""What vLLM's processor made of one item, less its pixels, as a few hundred bytes: an item record.

Placeholder tokens are runs (token, count), as is the mask of those that get embeddings; small fields are in vLLM's own
serialisation. A record is made from what the processor gave, and kept only if reading it back gives the same, so what
can't be said in one (a place in the prompt that is a function) has none. API server process; pure functions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import msgspec
import torch
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.multimodal.processing.processor import PromptUpdateDetails, ResolvedPromptUpdate, UpdateMode
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_mmcache.pixels.item import small_fields

MAX_BYTES = 32 * 1024  # of a record; a long video's placeholders are its longest

_INLINE = 1 << 20  # vLLM's encoder puts no tensor of a small field into a buffer of its own

Updates = Sequence[ResolvedPromptUpdate]
Run = tuple[int, int]


class _Update(msgspec.Struct, array_like=True, frozen=True):
    modality: str
    mode: str
    target: list[int]
    tokens: list[Run]
    embeds: list[Run] | None


class _Record(msgspec.Struct, array_like=True, frozen=True):
    updates: list[_Update]
    fields: bytes


def describe(item: MultiModalKwargsItem, updates: Updates) -> bytes | None:
    """The record of an item; None where there can be none: nothing in it is large, or it can't be said exactly."""
    small = small_fields(item)
    if len(small) == len(item):
        return None
    try:
        fields = _encode(small)
        told = [_tell(update) for update in updates]
    except (TypeError, ValueError, AttributeError):
        return None
    record = msgspec.msgpack.encode(_Record(told, fields))
    if len(record) > MAX_BYTES or not _says(record, small, updates):
        return None
    return record


def restore(record: bytes) -> tuple[MultiModalKwargsItem, list[ResolvedPromptUpdate]]:
    """The small fields and the prompt updates, of item 0. Raises: msgspec.MsgspecError for what is no record."""
    found = msgspec.msgpack.decode(record, type=_Record)
    small = MsgpackDecoder(MultiModalKwargsItem).decode(bytearray(found.fields))  # writable, as torch wants it
    return small, [_update(one) for one in found.updates]


def _encode(small: MultiModalKwargsItem) -> bytes:
    """Serialised by vLLM's own encoder. Raises: TypeError for what it can't say."""
    (encoded,) = MsgpackEncoder(size_threshold=_INLINE).encode(small)
    return bytes(encoded)


def _tell(update: ResolvedPromptUpdate) -> _Update:
    """Raises: TypeError where the target is a function of the prompt."""
    full, is_embed = update.content.full, update.content.is_embed
    return _Update(
        modality=update.modality,
        mode=update.mode.value,
        target=[*map(int, _tokens(update.target))],
        tokens=_runs(map(int, _tokens(full))),
        embeds=None if is_embed is None else _runs(is_embed(full).int().tolist()),
    )


def _update(told: _Update) -> ResolvedPromptUpdate:
    full = _unrolled(told.tokens)
    details = PromptUpdateDetails(full=full)
    if told.embeds is not None:
        embeds = told.embeds

        def is_embed(tokens: list[int]) -> torch.Tensor:
            if len(tokens) != len(full):
                raise ValueError(f"{len(tokens)} placeholder tokens, not the {len(full)} that were recorded")
            return torch.tensor(_unrolled(embeds), dtype=torch.bool)

        details = replace(details, is_embed=is_embed)
    return ResolvedPromptUpdate(
        modality=told.modality, item_idx=0, mode=UpdateMode(told.mode), target=told.target, content=details
    )


def _says(record: bytes, small: MultiModalKwargsItem, updates: Updates) -> bool:
    """Whether a record says what was to be said."""
    found_small, found = restore(record)
    return (
        bool(found_small == small)
        and _encode(found_small) == _encode(small)  # how fields are batched, as it arrives in the engine
        and len(found) == len(updates)
        and all(map(_are_equal, found, updates))
    )


def _are_equal(one: ResolvedPromptUpdate, other: ResolvedPromptUpdate) -> bool:
    first, second = one.content, other.content
    if (one.modality, one.mode, one.target, first.full) != (other.modality, other.mode, other.target, second.full):
        return False
    if first.is_embed is None or second.is_embed is None:
        return first.is_embed is second.is_embed
    return bool(torch.equal(first.is_embed(first.full), second.is_embed(second.full)))


def _tokens(tokens: Any) -> list[int]:
    if not isinstance(tokens, list):
        raise TypeError(f"{type(tokens).__name__} is not a list of tokens")
    return tokens


def _runs(values: Iterable[int]) -> list[Run]:
    return [(value, sum(1 for _ in run)) for value, run in groupby(values)]


def _unrolled(runs: Iterable[Run]) -> list[int]:
    found: list[int] = []
    for value, count in runs:
        found += [value] * count
    return found
