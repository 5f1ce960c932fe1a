# SPDX-License-Identifier: Apache-2.0
"""Finds base64 text in the bytes of a JSON body, at the speed of memchr, before anybody parses it.

Only candidates: a string that opens with `data:image/...;base64,`, or the value of a key `data`. Whether a candidate
is an image of the request is decided on the parsed rest of the body (`shapes`). Strings that write the needle itself
with escapes, bodies in UTF-16 and short images are not found, and then stay as they are.
"""

import re
from collections.abc import Iterator, Sequence

MIN_TEXT_BYTES = 1024  # a shorter image costs less than looking at it

NEEDLE = b'"data'  # a body without it has no candidate
_DATA_URL = re.compile(rb'"data:image(?:/|\\/|\\u002[fF])[^",\\\x00-\x1f]{1,100};base64,')
_DATA_KEY = re.compile(rb'"data"[ \t\r\n]*:[ \t\r\n]*"')


def find_texts(body: bytes) -> Iterator[tuple[int, int]]:
    """The (start, end) of each candidate's base64 text as it stands in the body, in order, apart from each other."""
    at = body.find(NEEDLE)
    while at >= 0:
        opened = None if _is_escaped(body, at) else _DATA_URL.match(body, at) or _DATA_KEY.match(body, at)
        if opened is None:
            at = body.find(NEEDLE, at + 1)
            continue
        start, end = opened.end(), body.find(b'"', opened.end())
        if end < 0:
            return
        if end - start >= MIN_TEXT_BYTES and body[end - 1] != ord("\\"):
            yield start, end
        at = body.find(NEEDLE, end)


def replace_spans(body: bytes, spans: Sequence[tuple[int, int]], texts: Sequence[bytes | memoryview]) -> bytes:
    """The body with each span, in order, replaced by its text."""
    view = memoryview(body)
    pieces: list[bytes | memoryview] = []
    at = 0
    for (start, end), text in zip(spans, texts, strict=True):
        pieces += (view[at:start], text)
        at = end
    return b"".join([*pieces, view[at:]])


def _is_escaped(body: bytes, at: int) -> bool:
    """Whether the quote at `at` is escaped, and so lies within a string."""
    first = at
    while first and body[first - 1] == ord("\\"):
        first -= 1
    return (at - first) % 2 == 1
