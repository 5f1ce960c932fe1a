# SPDX-License-Identifier: Apache-2.0
"""Finds base64 text in the bytes of a JSON body, at the speed of memchr, before anybody parses it.

Only candidates: a string that opens with `data:image/...;base64,`, or the value of a key `data`. Whether a candidate
is an image of the request is decided on the parsed rest of the body (components/image_extraction/request_shapes.py).
Strings that write their opening with other escapes than of a slash, bodies in UTF-16 and short images are not found,
and then stay as they are.

A text is long and has no quote in it, so it is looked for around one byte in so many, and memchr passes over what
stands between: quotes, needles and backslashes cost no step of Python, however many there are.
"""

import json
import re
from collections.abc import Iterator, Sequence

_DATA_URL = re.compile(rb'data:image(?:/|\\/|\\u002[fF])[^",\\\x00-\x1f]{1,100};base64,')
_DATA_KEY = re.compile(rb'"data"[ \t\r\n]*:[ \t\r\n]*\Z')
_MAX_KEY_BYTES = 64  # with the white space around the colon


def find_texts(body: bytes, min_bytes: int) -> Iterator[tuple[int, int]]:
    """The (start, end) of each candidate's base64 text as it stands in the body, in order, apart from each other.

    Texts shorter than `min_bytes` are not found. Takes one step for so many bytes of the body, at most.
    """
    quote = 0
    while (inside := quote + min_bytes) < len(body):  # a long string that opens here or next holds this place
        opened, quote = body.rfind(b'"', quote, inside), body.find(b'"', inside)
        if quote < 0:
            return
        if opened >= 0 and quote - opened > min_bytes and body[quote - 1] != ord("\\"):
            start = _start_of_text(body, opened)
            if start and quote - start >= min_bytes:
                yield start, quote


def replace_spans(body: bytes, spans: Sequence[tuple[int, int]], texts: Sequence[bytes | memoryview]) -> bytes:
    """The body with each span, in order, replaced by its text."""
    view = memoryview(body)
    pieces: list[bytes | memoryview] = []
    at = 0
    for (start, end), text in zip(spans, texts, strict=True):
        pieces += (view[at:start], text)
        at = end
    return b"".join([*pieces, view[at:]])


def is_string(text: memoryview) -> bool:
    """Whether JSON can have this between two quotes; a control character, for one, it can't."""
    try:
        json.loads(b'"%b"' % bytes(text))
    except ValueError:
        return False
    return True


def _start_of_text(body: bytes, opened: int) -> int:
    """Where the text begins in the string that opens here, if it may be one: after the head of a data URL, if any."""
    url = _DATA_URL.match(body, opened + 1)
    if url:
        return 0 if body[opened - 1] == ord("\\") else url.end()  # an escaped quote: inside a string
    return opened + 1 if _DATA_KEY.search(body[max(0, opened - _MAX_KEY_BYTES) : opened]) else 0
