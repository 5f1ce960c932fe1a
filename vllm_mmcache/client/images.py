# SPDX-License-Identifier: Apache-2.0
"""The images of one chat request: their content names, and the request's body with or without their bytes. Pure.

The body is cut at its base64 texts and only the rest is parsed; the texts are decoded, since names are those of files
(content/content_name.py). Client's process.
"""

import json
import re
import secrets
from collections.abc import Collection, Iterator
from typing import Any

import pybase64

from vllm_mmcache.content.base64_scan import find_texts, is_string, replace_spans
from vllm_mmcache.content.content_name import name_of

_MIN_TEXT_BYTES = 1024  # a shorter image is sent each time

# What the server's answer to "do you know this image" depends on, besides the server and the user.
SCOPE_FIELDS = ("model", "cache_salt", "mm_processor_kwargs", "media_io_kwargs")


class Images:
    """One parsed request with images. Not for several threads at once."""

    def __init__(
        self, request: dict[str, Any], stem: str, texts: list[memoryview], parts: list[tuple[dict[str, Any], str]]
    ):
        self._request = request
        self._name = re.compile(re.escape(stem.encode()) + rb"(\d+)")
        self._texts = texts
        self._parts = [(part, part["image_url"]) for part, _ in parts]
        self.ids = [name for _, name in parts]

    @property
    def scope(self) -> list[Any]:
        """What else the server looks images up by."""
        return [self._request.get(field) for field in SCOPE_FIELDS]

    def body(self, known: Collection[str]) -> bytes:
        """The request with every image named, and without the bytes of those in `known`."""
        for (part, image_url), one in zip(self._parts, self.ids, strict=True):
            part |= {"uuid": one, "image_url": None if one in known else image_url}
        short = json.dumps(self._request, separators=(",", ":")).encode()
        found = list(self._name.finditer(short))
        return replace_spans(short, [match.span() for match in found], [self._texts[int(match[1])] for match in found])


def find_images(body: bytes) -> Images | None:
    """Parse a chat request; None where it has no image to name, or is nothing that we know."""
    spans = list(find_texts(body, _MIN_TEXT_BYTES))
    if not spans:
        return None
    stem = f"mmcache-{secrets.token_hex(16)}-"
    names = [f"{stem}{number}".encode() for number in range(len(spans))]
    try:
        request = json.loads(replace_spans(body, spans, names))
    except (ValueError, RecursionError):
        return None  # the server says what is wrong with it
    parts = [part for part in _parts(request) if _is_ours(part, stem)]
    view = memoryview(body)
    texts = [view[start:end] for start, end in spans]
    named = {_number(_url(part), stem) for part in parts}
    if not all(is_string(text) for number, text in enumerate(texts) if number not in named):
        return None  # with what is left in it, the body is no JSON; the server says so
    names_of = {number: _name_of(texts[number]) for number in named}
    found = [(part, name) for part in parts if (name := names_of[_number(_url(part), stem)]) is not None]
    return Images(request, stem, texts, found) if found else None


def _parts(request: Any) -> Iterator[dict[str, Any]]:
    for message in _dicts(request.get("messages") if isinstance(request, dict) else None):
        yield from _dicts(message.get("content"))


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _is_ours(part: dict[str, Any], stem: str) -> bool:
    """Whether this is an image part with bytes in it, and without an id of the caller's own."""
    return part.get("type") == "image_url" and "uuid" not in part and stem in _url(part)


def _url(part: dict[str, Any]) -> str:
    """The URL of an image part, which is a text or the `url` of an object; empty where there is none."""
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    return url if isinstance(url, str) else ""


def _name_of(text: memoryview) -> str | None:
    """The content name of an image as base64 text in JSON; None where it is none, which the server says."""
    for escaped in (False, True):  # some clients put a backslash before every slash
        try:
            given = bytes(text).replace(b"\\/", b"/") if escaped else text
            return name_of(pybase64.b64decode(given, validate=True))
        except ValueError:
            continue
    return None


def _number(url: str, stem: str) -> int:
    """Which of the texts stood in this URL."""
    return int(url.partition(stem)[2])
