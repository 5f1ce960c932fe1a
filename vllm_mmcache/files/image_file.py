# SPDX-License-Identifier: Apache-2.0
"""What the head of an image's file says, without decoding its pixels. Any thread."""

import contextlib
import io
from typing import NamedTuple

from PIL import Image


class Head(NamedTuple):
    """Units: pixels."""

    width: int
    height: int
    media_type: str


def head_of(content: bytes, formats: tuple[str, ...] | None = None) -> Head | None:
    """The head of a file that Pillow opens; None for what it does not open, and for what it takes for a bomb.

    formats: those that are tried, by Pillow's names; all of them if None.
    """
    with contextlib.suppress(Exception), Image.open(io.BytesIO(content), formats=formats) as image:
        return Head(*image.size, image.get_format_mimetype() or "image/png")
    return None
