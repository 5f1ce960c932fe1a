# SPDX-License-Identifier: Apache-2.0
"""What API server and engine tell each other about one request: two short JSON texts, one each way.

They travel as one more entry of vLLM's trace headers: down with the request, up with its first output only. So they
reach the API server that asked, from engines in other processes and on other machines, and need no port of their own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HEADER = "mmcache-observe"


@dataclass
class ImageNote:
    """What the API server saw of one image, in the prompt's order."""

    content: str = ""
    settings: str = ""
    width: int = 0
    height: int = 0
    body: str = "unknown"
    decode: str = "unknown"
    processor: str = "unknown"


@dataclass
class Asked:
    """What the API server says of a request. turns: positions in tokens; echoes: indices of turns."""

    id: str
    time_s: float
    turns: list[int] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    echoes: list[int] = field(default_factory=list)
    images: list[ImageNote] = field(default_factory=list)


def pack(asked: Asked) -> str:
    """The text for the way to the engine."""
    return json.dumps(vars(asked) | {"images": [list(vars(note).values()) for note in asked.images]})


def unpack(text: str) -> Asked:
    """Of the text that `pack` made."""
    said = json.loads(text)
    return Asked(**{**said, "images": [ImageNote(*values) for values in said["images"]]})


@dataclass
class Outcome:
    """What the engine says of a request with its first output. All of it can go into a record."""

    id: str
    time_s: float
    prompt_tokens: int
    reused_tokens: int
    external_tokens: int
    block_tokens: int
    engine: int
    lora: str
    salt: str
    groups: list[tuple[int, str, int, int, bool]] = field(default_factory=list)
    nearest: tuple[str, float, int, bool, bool] | None = None
    turns: list[int] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    images: list[tuple[Any, ...]] = field(default_factory=list)
    """offset, length, digest, width, height, body, decode, processor, features."""
    causes: list[tuple[str, int, int, int, dict[str, Any]]] = field(default_factory=list)
    """reason, start, tokens, at, details."""


def pack_outcome(outcome: Outcome) -> str:
    """The text for the way back."""
    return json.dumps(vars(outcome))


def unpack_outcome(text: str) -> Outcome:
    """Of the text that `pack_outcome` made."""
    return Outcome(**json.loads(text))


def take(headers: Mapping[str, str] | None) -> tuple[str | None, Mapping[str, str] | None]:
    """Our text among trace headers, and the headers without it; None for headers where nothing else was there."""
    if not headers or HEADER not in headers:
        return None, headers
    rest = {name: value for name, value in headers.items() if name != HEADER}
    return headers[HEADER], rest or None


def add(headers: Mapping[str, str] | None, text: str) -> dict[str, str]:
    """Trace headers with our text among them."""
    return {**(headers or {}), HEADER: text}
