# SPDX-License-Identifier: Apache-2.0
"""Requests about pictures, as clients of three protocols send them."""

import base64
import io
from typing import Any

from PIL import Image

Request = dict[str, Any]


def png(number: int, size: tuple[int, int] = (64, 32)) -> str:
    """A picture as base64."""
    file = io.BytesIO()
    Image.new("RGB", size, (number % 256, number // 256, 9)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def image(number: int, size: tuple[int, int] = (64, 32)) -> Request:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(number, size)}"}}


def text(words: str) -> Request:
    return {"type": "text", "text": words}


def user(*parts: Request) -> Request:
    return {"role": "user", "content": list(parts)}


def said(words: str) -> Request:
    return {"role": "assistant", "content": words}


def chat(*messages: Request, **more: Any) -> Request:
    return {"model": "m", "messages": list(messages), **more}
