# SPDX-License-Identifier: Apache-2.0
"""What API server and engine tell each other about one request: two short texts, one each way.

They travel as one more entry of vLLM's trace headers: down with the request, up with its first output only. So they
reach the API server that asked, from engines in other processes and on other machines, and need no port of their own.
Neither side says what the other can know by itself, and the engine reads the notes only of requests that it compares.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from vllm_mmcache.components.observe.record.schema import Reason

HEADER = "mmcache-observe"

Span = tuple[int, int, str]
"""One image of a prompt: offset and length in tokens; vLLM's identifier, with everything its features depend on."""


class Cause(NamedTuple):
    """A run of tokens and its reason. `at` is where the cause lies, when not at its start. Units: tokens, all three."""

    reason: Reason
    start: int
    tokens: int
    at: int
    details: dict[str, Any]


class Notes(msgspec.Struct, array_like=True):
    """What is known of a prompt besides its tokens. turns: positions in tokens."""

    turns: list[int] = []
    roles: list[str] = []
    messages: list[int] = []
    """Digest of the template and its arguments, then of each message."""
    spans: list[Span] = []
    images: list[tuple[str, str, int, int]] = []
    """Digest of the bytes, digest of the processor settings, width, height; empty or 0 where unknown."""


class Outcome(msgspec.Struct, array_like=True):
    """What the engine says of a request with its first output. All of it can go into a record."""

    ticket: str
    """The id of the record that the API server will make; empty where it sent none."""
    id: str
    """The same; of one of several answers, with its number."""
    reused_tokens: int
    external_tokens: int
    block_tokens: int
    engine: int
    groups: list[tuple[int, str, int, int, bool]]
    """index, kind, tokens of a block, tokens of its hit, whether it vetoed."""
    nearest: tuple[str, float, int, bool, bool] | None
    """id of its record, seconds before, tokens in common, same salt, same adapter."""
    features: dict[int, str]
    """Where the features of an image came from, for images that were encoded or loaded for this request."""
    causes: list[Cause]


_encode = msgspec.json.Encoder().encode
_decode_notes = msgspec.json.Decoder(Notes).decode
_decode_outcome = msgspec.json.Decoder(Outcome).decode


def pack(ticket: str, request_id: str, notes: Notes) -> str:
    """The text for the way to the engine. A ticket has no space."""
    return f"{ticket} {request_id}\n{_encode(notes).decode()}"


def open_notes(text: str) -> tuple[str, str, str]:
    """Of the text that `pack` made: ticket, request id, and what `read_notes` reads. An id may have any character."""
    head, _, notes = text.rpartition("\n")
    ticket, _, request_id = head.partition(" ")
    return ticket, request_id, notes


def read_notes(text: str) -> Notes:
    """The notes themselves; empty where none came. Raises: msgspec.MsgspecError for what `pack` did not make."""
    return _decode_notes(text) if text else Notes()


def pack_outcome(outcome: Outcome) -> str:
    """The text for the way back."""
    return _encode(outcome).decode()


def ticket_of(outcome: str) -> str:
    """The ticket alone, of the text that `pack_outcome` made. It is the first of a list, and needs no escapes."""
    return outcome[2 : outcome.find('"', 2)]


def unpack_outcome(text: str) -> Outcome:
    """Of the text that `pack_outcome` made. Raises: msgspec.MsgspecError for any other."""
    return _decode_outcome(text)


def take(headers: Mapping[str, str] | None) -> tuple[str | None, Mapping[str, str] | None]:
    """Our text among trace headers, and the headers without it; None for headers where nothing else was there."""
    if not headers or HEADER not in headers:
        return None, headers
    rest = {name: value for name, value in headers.items() if name != HEADER}
    return headers[HEADER], rest or None


def add(headers: Mapping[str, str] | None, text: str) -> dict[str, str]:
    """Trace headers with our text among them."""
    return {**(headers or {}), HEADER: text}
