# SPDX-License-Identifier: Apache-2.0
"""What KV events say of images and tenants, in the form that the router at hand understands. Pure: no vLLM.

A KV event names the blocks that were stored, with the extra keys of each: the LoRA adapter's name, pairs of an image's
id and its offset, and in a conversation's first block the salt. A router compares them with a request that it has not
sent yet. So what is published decides where requests go, and no more: the keys of the blocks themselves stay as they
are.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

_MARKER = re.compile(r"[0-9a-f]{16}0{48}")
"""The uuid by which Dynamo's frontend names an image that it sends: a digest of 64 bits, filled up with zeros."""
_DIGITS = 16
"""Of an id, those that Dynamo's router reads."""
_ID = re.compile(r"[0-9a-f]{64}")

Keys = Sequence[Any] | None
"""Of one block; None where it has none."""


def marker_in(name: str | None) -> str:
    """The digits that Dynamo's frontend has made for an image; empty where this uuid is not of its form."""
    return name[:_DIGITS] if name is not None and _MARKER.fullmatch(name) else ""


def published(blocks: Sequence[Keys], lora_name: str | None, ids: str, has_salts: bool) -> list[tuple[Any, ...] | None]:
    """The extra keys of an event's blocks in the form that is asked for.

    ids: the value of the setting kv_event_ids; has_salts: that of kv_event_salts.
    """
    return [_of_block(keys, lora_name, ids, has_salts) for keys in blocks]


def _of_block(keys: Keys, lora_name: str | None, ids: str, has_salts: bool) -> tuple[Any, ...] | None:
    if keys is None:
        return None
    found = tuple(
        _short(key) if ids == "dynamo" else key for key in (keys if has_salts else _unsalted(keys, lora_name))
    )
    return found or None


def _unsalted(keys: Sequence[Any], lora_name: str | None) -> Iterator[Any]:
    """Without the salt: it is a text of its own, as is the adapter's name, which comes first."""
    left = lora_name
    for key in keys:
        if not isinstance(key, str):
            yield key
        elif key == left:
            left = None
            yield key


def _short(key: Any) -> Any:
    """An image's id and its offset as Dynamo's router reads it; any other key as it is."""
    if isinstance(key, tuple | list) and len(key) == 2 and isinstance(key[0], str) and _ID.fullmatch(key[0]):
        return key[0][:_DIGITS].ljust(len(key[0]), "0"), key[1]
    return key
