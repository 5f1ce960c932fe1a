# SPDX-License-Identifier: Apache-2.0
"""Request bodies as clients write them and as nobody should, and random changes to any bytes. A case is its number."""

import base64
import json
import re
from collections.abc import Sequence
from random import Random
from typing import Any

from vllm_mmcache.content import placeholders

NUM = {
    "bodies": 5000,
    "applications": 400,
    "structured": 200,
    "clients": 1000,
    "references": 2000,
    "packages": 2500,
    "frames": 2000,
}
"""Cases in CI, by the kind of what they change."""

PLACES = {
    "/v1/responses": "input", "/v1/responses/render": "input", "/v2/embed": "images", "/v1/systemone": "images",
    "/score": "data_1", "/v1/score": "data_2", "/inference/v1/generate": "content_parts",
}  # fmt: skip
"""By endpoint: the key of a request that has its images; "messages" of all others."""

HEADS = (
    *("data:image/png;base64,",) * 30,
    "data:image/svg+xml;charset=utf-8;base64,",
    "data:image/" + "x" * 101 + ";base64,",
    "data:image/;base64,",
    "data:image/png,",
    "DATA:image/png;base64,",
    "data:video/mp4;base64,",
    "data:image/png;base64",
    'x"data:image/png;base64,',
    "",
)
TAILS = (*("",) * 40, "!", "=", "\n", " ", "é", "\ud800", '"', "\\", ",", "\u2028")
WORDS = (
    "",
    "a",
    'data:"',
    "\\",
    "é\u2028",
    "\ud83d\ude00",
    "\udead",
    "mmcache-",
    placeholders.PREFIX + "0" * 32 + "-0",
)
KEYS = ("type", "image_url", "url", "content", "data", "source", "messages", "role", "text", "input", 'x"data', "")
TOKENS = (
    b'"', b"\\", b'\\"', b"\\/", b"\\u002f", b"\\u0000", b"\\ud800", b"\x00", b"\n", b"\xff", b"\xef\xbb\xbf", b"{",
    b"}", b"[", b"]", b",", b":", b" " * 70, b'"data"', b'"data":"', b'"data:image/png;base64,', b";base64,", b"NaN",
    b"\xed\xa0\x80", b'"url":', b"A" * 40, b"A" * 4000, b"[" * 50, b"mmcache-", b"=", b"/", b"null", b"1e999",
)  # fmt: skip


def changed(chance: Random, content: bytes, tokens: Sequence[bytes] = TOKENS) -> bytes:
    """`content` after one to four changes: bytes flipped, cut out, doubled, moved; tokens put in."""
    for _ in range(chance.randint(1, 4)):
        at = chance.randint(0, len(content))
        end = min(len(content), at + chance.choice((1, 1, 2, 8, 64)))
        kind = chance.randint(0, 5)
        if kind == 0 and at < len(content):
            content = content[:at] + bytes([content[at] ^ 1 << chance.randint(0, 7)]) + content[at + 1 :]
        elif kind == 1:
            content = content[:at] + content[end:]
        elif kind == 2:
            content = content[:end] + content[at:]
        elif kind == 3:
            there = chance.randint(0, len(content))
            content = content[:there] + content[at:end] + content[there:]
        elif kind == 4:
            content = content[:at]
        else:
            content = content[:at] + chance.choice(tokens) + content[at:]
    return content


def body(chance: Random, path: str) -> bytes:
    """A request of this endpoint as JSON, written in one of the many ways; a third of them with changes."""
    request: Any = {"model": "m"}
    for _ in range(chance.randint(1, 2)):
        key = chance.choice((*(PLACES.get(path, "messages"),) * 5, *PLACES.values(), "x"))
        request[key] = _list(chance, {"images": _image, "content_parts": _part}.get(key, _message))
    if chance.random() < 0.2:
        request["cache_salt"] = chance.choice(("a", "", "\ud800", 1))
    text = _written(chance, request)
    if chance.random() < 0.03:
        return text.encode(chance.choice(("utf-8-sig", "utf-16", "utf-32")), "surrogatepass")
    content = text.encode("utf-8", "surrogatepass")
    return changed(chance, content) if chance.random() < 0.3 else content


def _text(chance: Random) -> str:
    return base64.b64encode(bytes([chance.randint(0, 255)]) * chance.choice((3, 30, 100, 200, 500))).decode()


def _image(chance: Random) -> Any:
    if chance.random() < 0.1:
        return chance.choice((None, 1, [], {}, *WORDS))
    return chance.choice(HEADS) + _text(chance) + chance.choice(TAILS)


def _list(chance: Random, one: Any) -> list[Any]:
    return [one(chance) for _ in range(chance.choice((0, 1, 1, 2, 2, 3)))]


def _message(chance: Random) -> Any:
    if chance.random() < 0.1:
        return _list(chance, _message)
    role = chance.choice(("user", "user", "assistant"))
    content = _image(chance) if chance.random() < 0.1 else _list(chance, _part)
    return {"role": role, chance.choice((*("content",) * 20, "output", "type")): content}


def _part(chance: Random) -> Any:
    image = _image(chance)
    kind = chance.randint(0, 9)
    if kind < 4:
        return {"type": "image_url", "image_url": {"url": image}}
    if kind == 4:
        return {"type": chance.choice(("input_image", "image_url", "text", None, [])), "image_url": image}
    if kind == 5:
        source = {"type": chance.choice(("base64", "url")), "media_type": "image/png", "data": _text(chance)}
        return {"type": "image", "source": source}
    if kind == 6:
        return {"type": "tool_result", "content": _list(chance, _part) if chance.random() < 0.5 else image}
    if kind == 7:
        return {"type": "text", "text": chance.choice((image, f'"{image}"', *WORDS))}
    if kind == 8:
        return {chance.choice(KEYS): image, chance.choice(KEYS): chance.choice(WORDS)}
    return {"type": "input_audio", "input_audio": {"data": _text(chance)}}


def _written(chance: Random, value: Any) -> str:
    """JSON with the white space, escapes, numbers and doubled keys that are allowed, and some that are not."""
    space = chance.choice((*(" ", "\n\t") * 9, " " * 70)) if chance.random() < 0.2 else ""
    if isinstance(value, dict):
        items = [(key, one) for key, one in value.items() for _ in range(1 if chance.random() < 0.97 else 2)]
        if len(items) > len(value):
            chance.shuffle(items)
        written = [f"{_string(chance, key)}{space}:{space}{_written(chance, one)}" for key, one in items]
        return f"{{{space}{','.join(written)}{space}}}"
    if isinstance(value, list):
        return f"[{space}{f'{space},{space}'.join([_written(chance, one) for one in value])}{space}]"
    if isinstance(value, str):
        return _string(chance, value)
    return chance.choice((json.dumps(value),) * 8 + ("NaN", "1e999", "-0", "9" * 50, "1.0"))


def _string(chance: Random, value: str) -> str:
    written = json.dumps(value, ensure_ascii=chance.random() < 0.7)
    if chance.random() < 0.3:
        written = written.replace("/", chance.choice(("\\/", "\\u002f", "\\u002F")))
    if chance.random() < 0.05:
        letter = chance.choice("dAb6:;i,")
        written = re.sub(rf"(?<!\\){letter}", lambda _: f"\\u{ord(letter):04x}", written, count=chance.randint(0, 2))
    return written
