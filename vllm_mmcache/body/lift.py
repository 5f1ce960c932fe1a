# SPDX-License-Identifier: Apache-2.0
"""Lifts images out of one body: the body that the application gets, and what its short names stand for. Pure.

The body is cut at every candidate and the rest is parsed, which takes no time without the images. A candidate is
lifted if the parsed request has it in a place of an image and it is base64; every other one is put back as it was.
So what is left to the application is the same request, or, where anything is odd, the same bytes.
"""

import json
from dataclasses import dataclass

from vllm_mmcache import rooms, tenant
from vllm_mmcache.body import references
from vllm_mmcache.body.payload import Payload
from vllm_mmcache.body.scan import find_texts, replace_spans
from vllm_mmcache.body.shapes import Walker


@dataclass(frozen=True)
class Lifted:
    """A short body, the payloads by their names in it, and what was taken out. Units: num_bytes of base64 text."""

    body: bytes
    payloads: dict[str, Payload]
    num_bytes: int


def lift(body: bytes, walker: Walker) -> Lifted | None:
    """Take the images out of a body; None where there is nothing to take."""
    spans = list(find_texts(body))
    if not spans:
        return None
    stem = references.new_stem()
    names = [f"{stem}{number}" for number in range(len(spans))]
    try:
        request = json.loads(replace_spans(body, spans, [name.encode() for name in names]))
    except (ValueError, RecursionError):
        return None
    if not isinstance(request, dict):
        return None
    wanted = {value[value.find(stem) :] for value in walker(request) if stem in value}
    tenant_key = _tenant_key(request.get("cache_salt"))
    payloads: dict[str, Payload] = {}
    texts: list[bytes | memoryview] = []
    left: list[memoryview] = []
    view = memoryview(body)
    for name, (start, end) in zip(names, spans, strict=True):
        payload = _read(view[start:end], tenant_key) if name in wanted else None
        if payload is None:
            left.append(view[start:end])
            texts.append(view[start:end])
        else:
            payloads[name] = payload
            texts.append(name.encode())
    if not payloads or not all(map(_is_string, left)):  # with what is left in it, the body may be no JSON
        return None
    num_bytes = sum(len(payload.text) for payload in payloads.values())
    return Lifted(replace_spans(body, spans, texts), payloads, num_bytes)


def _tenant_key(salt: object) -> bytes | None:
    """As the image loader will know it; a salt that vLLM refuses is of no account."""
    try:
        return tenant.key_of(salt) if isinstance(salt, str) and rooms.is_on("identity") else None
    except UnicodeEncodeError:
        return None


def _is_string(text: memoryview) -> bool:
    """Whether JSON can have this between two quotes; a control character, for one, it can't."""
    try:
        json.loads(b'"%b"' % bytes(text))
    except ValueError:
        return False
    return True


def _read(text: memoryview, tenant_key: bytes | None) -> Payload | None:
    """The payload of a JSON string's inside; some clients write every slash as `\\/`."""
    try:
        return Payload(text, tenant_key)
    except ValueError:
        pass
    try:
        return Payload(json.loads(b'"%b"' % bytes(text)).encode("ascii"), tenant_key)
    except ValueError:
        return None
