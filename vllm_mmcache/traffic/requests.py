# SPDX-License-Identifier: Apache-2.0
"""The texts and images of one request in the order in which a model reads them: OpenAI's, Anthropic's, Responses.

Pure: parsed JSON in, digests and sizes out.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pybase64
from blake3 import blake3
from PIL import ExifTags, Image, UnidentifiedImageError

HEAD_CHARS = 96 * 1024
"""Of base64, decoded first to find an image's size; a multiple of 4. Where that is too little, all of it is."""
DIGEST_BYTES = 16
_TURNED = (5, 6, 7, 8)  # values of the EXIF orientation whose width and height change places


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of a request. Units: pixels, and bytes of its file; 0 where they are not known."""

    digest: bytes
    width: int = 0
    height: int = 0
    num_bytes: int = 0
    format: str = ""
    """As Pillow names it, such as JPEG."""
    tokens: int | None = None
    """In the prompt, where somebody has counted them."""


@dataclass(frozen=True, slots=True)
class Words:
    """A piece of text, or the beginning of a message.

    tokens: how many it has, where somebody has counted them. It is reused whole or not at all then, and `text` may be a
    name that stands for it.
    """

    text: str
    tokens: int | None = None


Part = Picture | Words


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. turns: its messages, the system's among them; each begins with Words of the speaker's role."""

    turns: tuple[tuple[Part, ...], ...]
    tenant: str = ""


class NoPrompt(ValueError):
    """It is no request for an answer, or none of a kind that is known."""


def prompt_of(body: Any) -> Prompt:
    """What a request's parsed body asks. Raises: NoPrompt."""
    if not isinstance(body, dict):
        raise NoPrompt("no JSON object")
    messages = body.get("messages", body.get("input"))
    if isinstance(messages, str):  # Responses
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages:
        raise NoPrompt("neither 'messages' nor 'input'")
    turns = []
    system = body.get("system") or body.get("instructions")
    tools = body.get("tools")
    if system or tools:
        turns.append((Words("system"), *_parts(system), *([Words(_text(tools))] if tools else ())))
    for message in messages:
        if not isinstance(message, dict):
            raise NoPrompt("a message that is no JSON object")
        turns.append((Words(str(message.get("role", message.get("type", "user")))), *_said(message)))
    tenant = body.get("cache_salt")
    return Prompt(tuple(turns), tenant if isinstance(tenant, str) else "")


def _said(message: dict[str, Any]) -> Iterator[Part]:
    """What a message holds: its content, tools that it calls, and what they gave."""
    yield from _parts(message.get("content"))
    for name in ("tool_calls", "arguments", "output"):
        value = message.get(name)
        if value:
            yield from _parts(value if name == "output" else _text(value))


def _parts(content: Any) -> Iterator[Part]:
    if isinstance(content, str):
        yield Words(content)
    for part in content if isinstance(content, list) else ():
        if isinstance(part, str):
            yield Words(part)
        elif isinstance(part, dict):
            yield from _part(part)


def _part(part: dict[str, Any]) -> Iterator[Part]:
    kind = part.get("type")
    source, url = part.get("source"), part.get("image_url", part.get("image"))
    if kind == "image" and isinstance(source, dict):  # Anthropic
        named = source.get("data") or source.get("url") or source.get("file_id")
        yield picture_of(named, is_base64="data" in source)
    elif kind in ("image_url", "input_image", "image") or (kind is None and url):
        named = url.get("url") if isinstance(url, dict) else url
        yield picture_of(named or part.get("uuid") or part.get("file_id"))
    elif kind == "tool_result":
        yield from _parts(part.get("content"))
    elif isinstance(part.get("text"), str):
        yield Words(part["text"])
    else:
        yield Words(_text(part))


def picture_of(named: Any, *, is_base64: bool = False) -> Picture:
    """The image of a data URL, of base64, or of a name: what has no content here is told apart by its name."""
    text = named if isinstance(named, str) else _text(named)
    if text.startswith("data:"):
        text, is_base64 = text.partition(",")[2], True
    data = text.encode("utf-8", "surrogatepass")
    digest = blake3(data).digest(DIGEST_BYTES)
    return _opened(digest, data) if is_base64 else Picture(digest)


_seen: dict[bytes, Picture] = {}


def _opened(digest: bytes, data: bytes) -> Picture:
    """With its size; without one where it can't be read."""
    found = _seen.get(digest)
    if found is None:
        if len(_seen) >= 1 << 20:
            _seen.clear()
        found = _seen[digest] = _looked_at(digest, data)
    return found


def _looked_at(digest: bytes, data: bytes) -> Picture:
    num_bytes = len(data) * 3 // 4 - data[-2:].count(b"=")
    for piece in (data[:HEAD_CHARS], data) if len(data) > HEAD_CHARS else (data,):
        try:
            with Image.open(io.BytesIO(pybase64.b64decode(piece, validate=True))) as image:
                width, height = image.size
                if image.getexif().get(ExifTags.Base.Orientation) in _TURNED:
                    width, height = height, width
                return Picture(digest, width, height, num_bytes, image.format or "")
        except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError):
            continue
    return Picture(digest, 0, 0, num_bytes)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
