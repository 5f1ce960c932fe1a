# SPDX-License-Identifier: Apache-2.0
"""The short names that stand for images in a body, and what they stand for while their request is being answered.

A name holds 128 random bits of its request and characters that base64 does not have, so that a client can't guess one,
and one that is not valid (any more) fails as any text that is not base64 does. API server process; media threads read.
"""

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from typing import Protocol

from vllm_mmcache.base.lru import Size
from vllm_mmcache.metrics import table_sizes

PREFIX = f"mmcache-{secrets.token_hex(8)}-"  # of this process
MAX_NAME_CHARS = 128
"""More than the longest name has."""


class Payload(Protocol):
    """An image that a name stands for."""

    @property
    def content_id(self) -> bytes:
        """The digest of the image's file under its tenant's key."""

    @property
    def text(self) -> bytes | memoryview:
        """What was in the body; empty where nothing was."""

    def decode(self) -> bytes:
        """The image's file. Raises: ValueError where it can't be had."""


_lent: dict[str, Payload] = {}


def new_stem() -> str:
    """What the names of one request begin with; a number follows."""
    return f"{PREFIX}{secrets.token_hex(16)}-"


@contextlib.contextmanager
def register(payloads: Mapping[str, Payload]) -> Iterator[None]:
    """Names resolve to their payloads within the block, which is as long as their request is being answered."""
    _lent.update(payloads)
    try:
        yield
    finally:
        for name in payloads:
            del _lent[name]


def resolve(text: str) -> Payload | None:
    """The payload that `text` names; None if it is anything else."""
    return _lent.get(text) if text.startswith(PREFIX) else None


def size() -> Size:
    """What is held of bodies that are being answered: their images, as text."""
    payloads = tuple(_lent.values())
    return Size(len(payloads), sum(len(payload.text) for payload in payloads))


table_sizes.of_server("bodies", size)
