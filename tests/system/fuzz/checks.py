# SPDX-License-Identifier: Apache-2.0
"""What every case must keep, whatever its bytes are. Each raises AssertionError, or what nobody should have raised."""

import asyncio
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pybase64
import pydantic_core
import pytest

from tests.support.packages import features, identity
from vllm_mmcache.base.asgi import Message
from vllm_mmcache.base.errors import StoreCorrupt
from vllm_mmcache.client import images as client_images
from vllm_mmcache.client.images import find_images
from vllm_mmcache.components.features.package import Check, Shape, pack, unpack
from vllm_mmcache.components.image_extraction import extract as extracting
from vllm_mmcache.components.image_extraction import middleware
from vllm_mmcache.components.image_extraction.extract import extract
from vllm_mmcache.components.image_extraction.middleware import ExtractImagesMiddleware
from vllm_mmcache.components.image_extraction.request_shapes import WALKERS, Lists
from vllm_mmcache.content import placeholders
from vllm_mmcache.content.base64_image import Base64Image
from vllm_mmcache.content.content_name import PREFIX
from vllm_mmcache.storage.frame import frame, unframe

PATHS = sorted(WALKERS)
SHAPE = Shape(2, 8, "bfloat16")
MIN_TEXT_BYTES = 32
NAME = re.compile(re.escape(placeholders.PREFIX) + r"[0-9a-f]{32}-[0-9]+")
IMAGE_PLACES = {
    *(("image_url", "url"), ("content", "image_url"), ("output", "image_url"), ("source", "data")),
    *(("images",), ("content_parts", "url")),
}
"""The last two keys that lead to an image; said once more here, so that the list in `shapes` is held against it."""


@contextmanager
def short_texts() -> Iterator[None]:
    """Texts are extracted that are short, so that there are many, whatever is beside them."""
    with pytest.MonkeyPatch.context() as context:
        context.setattr(extracting, "MIN_TEXT_BYTES", MIN_TEXT_BYTES)
        context.setattr(middleware, "MIN_TEXT_BYTES", MIN_TEXT_BYTES)
        context.setattr(client_images, "_MIN_TEXT_BYTES", MIN_TEXT_BYTES)
        context.setattr(extracting, "_MIN_SHARE", 0.01)
        yield


def check_body(body: bytes, path: str) -> int:
    """What is left, with the texts put back, is to json and pydantic what came. Returns how many were extracted."""
    extracted = extract(body, WALKERS[path])
    if extracted is None:
        return 0
    texts = {name: bytes(payload.text).decode("ascii") for name, payload in extracted.payloads.items()}

    def put_back(text: str) -> str:
        return NAME.sub(lambda name: texts.get(name[0], name[0]), text)

    request = json.loads(body)  # what is no JSON is not extracted
    assert put_back(json.dumps(json.loads(extracted.body))) == json.dumps(request)
    assert put_back(_pydantic(extracted.body)) == _pydantic(body)
    keys = dict(_places(json.loads(extracted.body)))
    for name, text in texts.items():
        assert [place for value, place in keys.items() if value.endswith(name) and place[-2:] in IMAGE_PLACES]
        assert extracted.payloads[name].decode() == pybase64.b64decode(text, validate=True)
    at = 0
    for piece in _between(extracted.body, list(extracted.payloads)):
        found = body.find(piece, at)
        assert found >= 0 if at else found == 0, "bytes beside the images have changed"
        at = found + len(piece)
    assert at == len(body) or body.endswith(piece)
    return len(texts)


def check_application(body: bytes, path: str) -> int:
    """An application that opens images, and repeats what it refuses, answers alike with the layer and without it."""
    opened = 0

    async def application(scope: Any, receive: Any, send: Any) -> None:
        nonlocal opened
        status, said, num_extracted = _answer((await receive())["body"], path)
        opened += num_extracted
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": said})

    async def ask(asked: Any) -> list[Message]:
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        await asked({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send)
        return sent

    async def both() -> None:
        assert await ask(ExtractImagesMiddleware(application, lambda scope, path: True)) == await ask(application)

    asyncio.run(both())
    assert not placeholders.size().entries
    return opened


def check_client(body: bytes) -> int:
    """A client that names its images sends the same request otherwise; returns how many it named."""
    images = find_images(body)
    if images is None:
        return 0
    for known in ((), images.ids):
        try:
            sent = json.loads(images.body(known))
        except ValueError:
            sent = None  # broken within a text
        try:
            request = json.loads(body)
        except ValueError:
            assert sent is None or known, "the client sends as JSON what was none"
            continue
        named = [part for part in _dicts(sent) if str(part.get("uuid", "")).startswith(PREFIX)]
        assert [part.pop("uuid") for part in named] == images.ids
        if known:
            assert all(part["image_url"] is None for part in named)
        else:
            assert json.dumps(sent) == json.dumps(request)
    return len(images.ids)


def check_reference(text: str) -> None:
    """Only a name itself stands for its payload, as long as it is lent."""
    name = f"{placeholders.new_stem()}0"
    payload = Base64Image(b"AAAA")
    with placeholders.register({name: payload}):
        assert placeholders.resolve(text) is None
        for changed in (name + text, text + name, name.replace("-", text), name[: len(text)], name.upper()):
            assert placeholders.resolve(changed) is (payload if changed == name else None)
    assert placeholders.resolve(name) is None


def check_package(content: bytes) -> bool:
    """Bytes are the package that is written for what they hold, or they are refused; returns whether they are one.

    What is served is the package that was asked for, byte for byte.
    """
    asked = identity()
    try:
        seen = unpack(content)
        assert pack(*seen) == content
    except StoreCorrupt:
        return False
    finally:
        check = Check(asked, SHAPE)
        try:
            check.begin(content[: check.num_head_bytes], len(content))
            check.add(content[check.num_head_bytes :])
            check.end()
        except StoreCorrupt:
            pass
        else:
            assert content[check.num_head_bytes :] == features(0, SHAPE), "other features were served"
    return True


def check_frame(key: bytes, framed: bytes, made: tuple[bytes, bytes] | None = None) -> bool:
    """Bytes give the value of the frame that was made for the key, if they are it, or none; returns whether they do."""
    value = unframe(key, framed)
    assert (value is not None) == ((key, framed) == made)
    assert value is None or frame(key, value) == framed
    return value is not None


def _answer(body: bytes, path: str) -> tuple[int, bytes, int]:
    """As vLLM does: parse, open the images, answer with what they are; an error repeats the input and measures it."""
    extracted: dict[str, str] = {}
    try:
        request = json.loads(body)
        if not isinstance(request, dict):
            raise ValueError("no object")
        opened = []
        for image in WALKERS[path](request, Lists(10**6)):
            text = image.partition(",")[2] or image
            payload = placeholders.resolve(text)
            content = payload.decode() if payload else pybase64.b64decode(text, validate=True)
            opened.append(hashlib.sha256(content).hexdigest())
            if payload:
                extracted[text] = bytes(payload.text).decode("ascii")
        rest = NAME.sub(lambda name: extracted.get(name[0], name[0]), json.dumps(request))
    except (ValueError, RecursionError) as error:
        return 400, f"{len(body)} {error} {body[:50]!r} {body!r}".encode("utf-8", "replace"), len(extracted)
    return 200, f"{opened} {rest}".encode(), len(extracted)


def _pydantic(body: bytes) -> str:
    """What pydantic's own parser makes of it; it is stricter than json in places."""
    try:
        return repr(pydantic_core.from_json(body))
    except ValueError:
        return "refused"


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    """Every dict of parsed JSON, in order."""
    if isinstance(value, dict):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _dicts(one)


def _places(value: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every string of parsed JSON, with the keys that lead to it."""
    if isinstance(value, str):
        yield value, keys
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _places(one, (*keys, key))
    elif isinstance(value, list):
        for one in value:
            yield from _places(one, keys)


def _between(body: bytes, names: list[str]) -> list[bytes]:
    pieces = []
    for name in names:
        piece, _, body = body.partition(name.encode())
        pieces.append(piece)
    return [*pieces, body]
