# SPDX-License-Identifier: Apache-2.0
"""The pictures that clients send, the same in every run: noise, real screenshots, photographs, and variants of them.

Noise compresses badly: its files are several times as large as those of screenshots (screenshots.py). A variant has the
same pixels at the same cost, but bytes that no server has seen.
"""

import base64
import io
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from benchmarks.screenshots import Screenshot, photographs, screenshot


class Kind(NamedTuple):
    """One kind of noise. Units: size is (width, height) in pixels; noise in levels of 256, which sets the bytes."""

    mime: str
    size: tuple[int, int]
    noise: int
    options: dict[str, Any]


PNG = Kind("image/png", (1280, 720), 20, {"format": "PNG", "compress_level": 6})
JPEG = Kind("image/jpeg", (1920, 1080), 24, {"format": "JPEG", "quality": 86})
SMALL = Kind("image/png", (96, 96), 20, {"format": "PNG"})
SCREEN = Kind("image/png", (1280, 720), 2, {"format": "PNG", "compress_level": 6})  # about 0.6 MB


class Photograph(NamedTuple):
    """Real photographs of a third of a megapixel, as JPEG files; of another size where `size` is one.

    Units: size is (width, height), margin what is cut off, both in pixels.
    """

    mime: str = "image/jpeg"
    quality: int = 88
    margin: int = 64
    size: tuple[int, int] | None = None


PHOTOGRAPH = Photograph()
Pictured = Kind | Screenshot | Photograph


def picture(kind: Pictured, number: int) -> bytes:
    """The file of picture `number`, the same in every run; each number shows something else."""
    if isinstance(kind, Screenshot):
        return screenshot(kind, number)
    return _photograph(kind, number) if isinstance(kind, Photograph) else _noise(kind, number)


def _photograph(kind: Photograph, number: int) -> bytes:
    """One of the photographs, the frame is moved a little further each time."""
    shown = photographs()
    image = Image.open(shown[number % len(shown)]).convert("RGB")
    left, top = number // len(shown) * 7 % kind.margin, number // len(shown) * 3 % kind.margin
    width, height = image.size
    shown_part = image.crop((left, top, width - kind.margin + left, height - kind.margin + top))
    buffer = io.BytesIO()
    (ImageOps.fit(shown_part, kind.size) if kind.size else shown_part).save(buffer, "JPEG", quality=kind.quality)
    return buffer.getvalue()


def _noise(kind: Kind, number: int) -> bytes:
    """A slope of colours with bars and noise."""
    random = np.random.default_rng(number)
    width, height = kind.size
    slope = np.linspace(0, 200, width)[None, :, None] + np.linspace(0, 30, height)[:, None, None]
    pixels = slope * random.uniform(0.4, 1, 3) + random.integers(0, kind.noise, (height, width, 3))
    for row in random.integers(0, height - 8, 24):
        pixels[row : row + 8, : random.integers(1, width)] = random.integers(0, 255, 3)
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, **kind.options)
    return buffer.getvalue()


def variant(content: bytes, name: str) -> bytes:
    """The same picture as other bytes: `name` stands behind the end of the file."""
    return content + name.encode()


def data_url(kind: Pictured, content: bytes) -> str:
    return f"data:{kind.mime};base64,{base64.b64encode(content).decode()}"


def url_of(kind: Pictured, number: int) -> str:
    """Picture `number` as a data URL."""
    return data_url(kind, picture(kind, number))


def video(number: int, frames: int = 64, size: tuple[int, int] = (1280, 720)) -> bytes:
    """An mp4 of 2 frames a second: a square that wanders over a slope. Needs OpenCV, which vLLM brings."""
    import cv2

    width, height = size
    slope = np.linspace(0, 200, width, dtype=np.uint8)[None, :, None].repeat(height, 0).repeat(3, 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 2.0, size)
        if not writer.isOpened():
            raise RuntimeError("OpenCV can't write mp4 here: its wheel brings ffmpeg; is opencv-python-headless there?")
        for frame in range(frames):
            pixels = slope.copy()
            x, y = (number * 37 + frame * 8) % (width - 40), (number * 11 + frame * 4) % (height - 40)
            pixels[y : y + 40, x : x + 40] = (number % 256, frame * 3, 255 - number % 256)
            writer.write(pixels)
        writer.release()
        return path.read_bytes()
