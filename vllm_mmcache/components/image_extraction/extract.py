# SPDX-License-Identifier: Apache-2.0
"""Takes images out of one body: the body that the application gets, and what its short names stand for. Pure.

The body is cut at every candidate and the rest is parsed, which takes no time without the images. A candidate is
taken out if the parsed request has it in a place of an image and it is base64; every other one is put back as it was.
So what is left to the application is the same request, or, where anything is odd, the same bytes.

The application parses the rest again, so all this must save more than it takes: images must be a good part of the body,
and the rest of few elements (`python -m tests.support.bad_bodies` has the times).
"""

import json
import re
from dataclasses import dataclass

from vllm_mmcache.base import status, tenant
from vllm_mmcache.components.image_extraction.request_shapes import Lists, TooManyElements, Walker
from vllm_mmcache.content import placeholders
from vllm_mmcache.content.base64_image import Base64Image
from vllm_mmcache.content.base64_scan import find_texts, is_string, replace_spans

MIN_TEXT_BYTES = 8192  # json.loads takes 6 us for so much text, and taking one out takes as much
_MIN_SHARE = 0.25  # of the body that images have; json.loads would take longer for so much text than all this
_FREE_ELEMENTS = 256  # of lists that are looked at; each takes up to half a microsecond, ...
_BYTES_PER_ELEMENT = 1024  # ... and so many bytes of text less to parse save more
_BYTES_PER_ESCAPE = 32  # of a text; more escapes take longer to take out than json.loads takes
_OTHER_ESCAPE = re.compile(rb"\\[^/]")


@dataclass(frozen=True)
class Extraction:
    """A short body, the payloads by their names in it, and what was taken out. Units: num_bytes of base64 text."""

    body: bytes
    payloads: dict[str, Base64Image]
    num_bytes: int


def extract(body: bytes, walker: Walker) -> Extraction | None:
    """Take the images out of a body; None where there is nothing to take."""
    spans = list(find_texts(body, MIN_TEXT_BYTES))
    num_bytes = sum(end - start for start, end in spans)
    least = max(1, int(_MIN_SHARE * len(body)))
    if num_bytes < least:
        return None
    stem = placeholders.new_stem()
    names = [f"{stem}{number}" for number in range(len(spans))]
    try:
        request = json.loads(replace_spans(body, spans, [name.encode() for name in names]))
    except (ValueError, RecursionError):
        return None
    if not isinstance(request, dict):
        return None
    lists = Lists(_FREE_ELEMENTS + num_bytes // _BYTES_PER_ELEMENT)
    try:
        wanted = {value[value.find(stem) :] for value in walker(request, lists) if stem in value}
    except TooManyElements:
        return None
    tenant_key = _tenant_key(request.get("cache_salt"))
    if sum(end - start for name, (start, end) in zip(names, spans, strict=True) if name in wanted) < least:
        return None
    payloads: dict[str, Base64Image] = {}
    texts: list[bytes | memoryview] = []
    left: list[memoryview] = []
    view = memoryview(body)
    for name, (start, end) in zip(names, spans, strict=True):
        payload = _read(body, start, end, tenant_key) if name in wanted else None
        if payload is None:
            left.append(view[start:end])
            texts.append(view[start:end])
        else:
            payloads[name] = payload
            texts.append(name.encode())
    if not payloads or not all(map(is_string, left)):  # with what is left in it, the body may be no JSON
        return None
    num_bytes = sum(len(payload.text) for payload in payloads.values())
    return Extraction(replace_spans(body, spans, texts), payloads, num_bytes)


def _tenant_key(salt: object) -> bytes | None:
    """As the image loader will know it; a salt that vLLM refuses is of no account."""
    try:
        known = tenant.current(salt if isinstance(salt, str) else None)
        return tenant.key_of(known) if status.is_on("identity") else None
    except UnicodeEncodeError:
        return None


def _read(body: bytes, start: int, end: int, tenant_key: bytes | None) -> Base64Image | None:
    """The payload of a JSON string's inside; some clients put a backslash before every slash."""
    text: bytes | memoryview = memoryview(body)[start:end]
    try:
        if body.find(b"\\", start, end) >= 0:
            text = _unescaped(bytes(text))
        return Base64Image(text, tenant_key)
    except ValueError:
        return None


def _unescaped(text: bytes) -> bytes:
    """What the inside of a JSON string stands for, if it is ASCII. Raises: ValueError if not, or where it is none."""
    if _OTHER_ESCAPE.search(text):
        unescaped: str = json.loads(b'"%b"' % text)
        return unescaped.encode("ascii")
    return text.replace(b"\\", b"", len(text) // _BYTES_PER_ESCAPE)  # what keeps a backslash is no base64
