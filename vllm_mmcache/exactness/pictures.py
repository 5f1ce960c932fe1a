# SPDX-License-Identifier: Apache-2.0
"""Pictures made of their name, for checks and tests."""

import base64
import hashlib
import io

from PIL import Image, ImageDraw


def ellipses(name: str, size: tuple[int, int] = (224, 224)) -> Image.Image:
    """A background and six ellipses in places and colours that `name` chooses. size is (width, height) in pixels."""
    digest = hashlib.sha256(name.encode()).digest()
    image = Image.new("RGB", size, tuple(digest[:3]))
    draw = ImageDraw.Draw(image)
    for i in range(6):
        x, y = digest[3 + 2 * i] * size[0] // 256, digest[4 + 2 * i] * size[1] // 256
        draw.ellipse([x - 30, y - 20, x + 30, y + 20], fill=tuple(digest[15 + 2 * i : 18 + 2 * i]))
    return image


def png_url(image: Image.Image) -> str:
    """The image as a client sends it: a PNG in a data URL."""
    held = io.BytesIO()
    image.save(held, "PNG")
    return f"data:image/png;base64,{base64.b64encode(held.getvalue()).decode()}"
