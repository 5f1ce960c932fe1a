# SPDX-License-Identifier: Apache-2.0
"""The texts and images of one request in the order in which a model reads them: OpenAI's, Anthropic's, Responses.

Entries of the datasets of `vllm bench` are requests, too. Parsed JSON in, digests and sizes out; nothing is fetched.
Sizes of images that were opened are remembered.
"""

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import pybase64
from blake3 import blake3
from PIL import ExifTags, Image

HEAD_CHARS = 96 * 1024
"""Of base64, decoded first to find an image's size; a multiple of 4. Where that is too little, all of it is."""
DIGEST_BYTES = 16
_TURNED = (5, 6, 7, 8)  # values of the EXIF orientation whose width and height change places
_IMAGES = ("image_url", "input_image", "image", "computer_screenshot")
_OTHERS = ("input_audio", "audio", "audio_url", "video", "video_url", "document", "input_file", "file")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:\S+|file[-_]\S+")
"""A URL, a digest such as sha256:12ab, or the id of an uploaded file."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of a request. Units: pixels, and bytes of its file; 0 where they are not known."""

    digest: bytes
    """Of the base64 text, or of its name. Empty where the log has neither a name nor an image that can be opened."""
    width: int = 0
    height: int = 0
    num_bytes: int = 0
    format: str = ""
    """As Pillow names it, such as JPEG."""
    tokens: int | None = None
    """In the prompt, where somebody has counted them."""
    uuid: str = ""
    """The client's name for it: later requests may have that alone."""
    is_sent: bool = True
    """The request has its content or its address, and not only its uuid."""


@dataclass(frozen=True, slots=True)
class Other:
    """A video, a sound or a document: told apart by its content. Nobody knows how many tokens it has."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class Words:
    """A piece of text, or the beginning of a message.

    tokens: how many it has, where somebody has counted them. It is reused whole or not at all then, and `text` may be a
    name that stands for it.
    """

    text: str
    tokens: int | None = None


Part = Picture | Words | Other


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. turns: its messages, the system's among them; each begins with Words of the speaker's role."""

    turns: tuple[tuple[Part, ...], ...]
    tenant: str = ""
    is_continued: bool = False
    """It goes on with an answer that the server keeps, and has none of the turns before that."""


class NoPrompt(ValueError):
    """It is no request for an answer, or none of a kind that is known."""


def prompt_of(body: Any) -> Prompt:
    """What a request's parsed body asks. Raises: NoPrompt."""
    if not isinstance(body, dict):
        raise NoPrompt("no JSON object")
    messages = body.get("messages", body.get("input")) or _asked_by_bench(body)
    if isinstance(messages, str):  # Responses
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages:
        raise NoPrompt("none of 'messages', 'input', 'prompt' and 'conversations'")
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
    is_continued = bool(body.get("previous_response_id") or body.get("conversation"))
    return Prompt(tuple(turns), tenant if isinstance(tenant, str) else "", is_continued)


def _asked_by_bench(entry: dict[str, Any]) -> list[dict[str, Any]] | None:
    """What `vllm bench` asks for an entry of a dataset, ShareGPT's or one of its own; None where it is no such entry.

    Of `conversations` with two turns or more, the first turn is asked. Any body with a text `prompt` is an entry.
    Images come behind the text.
    """
    talk, text, paths = entry.get("conversations"), entry.get("prompt"), entry.get("image_files")
    if isinstance(talk, list) and len(talk) > 1 and isinstance(talk[0], dict):
        text, paths = talk[0].get("value"), [entry.get("image")]
    if not isinstance(text, str):
        return None
    named = [path for path in paths if isinstance(path, str)] if isinstance(paths, list) else []
    shown = [{"type": "image_url", "image_url": {"url": _path_or_url(name)}} for name in named]
    return [{"role": "user", "content": [{"type": "text", "text": text}, *shown]}]


def _path_or_url(name: str) -> str:
    return name if name.startswith("data:") or _NAME.fullmatch(name) else f"file://{quote(name)}"


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
    for part in content if isinstance(content, list) else [content] if isinstance(content, dict) else ():
        if isinstance(part, str):
            yield Words(part)
        elif isinstance(part, dict):
            yield from _part(part)


def _part(part: dict[str, Any]) -> Iterator[Part]:
    kind = part.get("type")
    source, url, file = part.get("source"), part.get("image_url", part.get("image")), part.get("file")
    if kind in _IMAGES or (kind is None and url):
        if isinstance(source, dict):  # Anthropic
            content, name = source.get("data"), source.get("url") or source.get("file_id")
        else:
            content, name = part.get("data"), (url.get("url") if isinstance(url, dict) else url) or part.get("url")
        yield _picture(content, name or part.get("file_id"), part.get("uuid"))
    elif kind == "file" and isinstance(file, dict) and file.get("file_id"):
        yield _picture(None, file["file_id"], None)
    elif kind == "tool_result":
        yield from _parts(part.get("content"))
    elif isinstance(part.get("text"), str):
        yield Words(part["text"])
    elif kind in _OTHERS and not (isinstance(source, dict) and source.get("type") in ("text", "content")):
        yield Other(digest_of(_text(part)))
    else:
        yield Words(_text(part))


def _picture(content: Any, name: Any, uuid: Any) -> Picture:
    """Describe the image of a part: of its base64 `content`, or else of its URL or name; with its uuid."""
    if isinstance(content, str) and content:
        found = picture_of(content, is_base64=True)
    else:
        found = picture_of(name) if isinstance(name, str) else UNKNOWN
    return replace(found, uuid=uuid, is_sent=bool(content or name)) if isinstance(uuid, str) else found


UNKNOWN = Picture(b"")


def picture_of(named: str, *, is_base64: bool = False) -> Picture:
    """Describe the image of a data URL, of base64, of a URL or of a name.

    is_base64: whether it can be nothing but base64. UNKNOWN for what is no URL or name, and no image that Pillow opens:
    logs may have placeholders such as "<image removed>", and equal placeholders do not mean equal images.
    """
    if named.startswith("data:"):
        named, is_base64 = named.partition(",")[2], True
    if is_base64 or _NAME.fullmatch(named) is None:
        return _opened(named.encode("utf-8", "surrogatepass"))
    return Picture(digest_of(named))


def digest_of(text: str) -> bytes:
    """What a text is known by; also one with halves of surrogate pairs, which JSON may have."""
    return blake3(text.encode("utf-8", "surrogatepass")).digest(DIGEST_BYTES)


_seen: dict[bytes, Picture] = {}


def _opened(data: bytes) -> Picture:
    """The image of base64, with its size; UNKNOWN where it is none that can be opened."""
    digest = blake3(data).digest(DIGEST_BYTES)
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
                # Without EXIF, Pillow decodes all of a PNG to look for it behind the pixels.
                if "exif" in image.info and image.getexif().get(ExifTags.Base.Orientation) in _TURNED:
                    width, height = height, width
                return Picture(digest, width, height, num_bytes, image.format or "")
        except Exception:  # strangers' files: Pillow's readers raise whatever comes up in them
            continue
    return UNKNOWN


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
