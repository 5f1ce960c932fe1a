# SPDX-License-Identifier: Apache-2.0
"""Pictures and videos of this benchmark, each with pixels of its own: no two may share features by chance."""

import base64
import io
import tempfile
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.pictures import Kind, data_url, picture

SCREEN = Kind("image/png", (1280, 720), 2, {"format": "PNG", "compress_level": 1})  # about 0.8 MB, as screenshots are
PHOTO = Kind("image/png", (1920, 1080), 2, {"format": "PNG", "compress_level": 1})
SIZES = ((640, 480), (1280, 720), (1920, 1080), (2560, 1600), (3840, 2160))  # 0.3 to 8.3 megapixels
FORMATS: dict[str, Kind] = {
    "png": Kind("image/png", (0, 0), 2, {"format": "PNG", "compress_level": 1}),
    "jpeg": Kind("image/jpeg", (0, 0), 24, {"format": "JPEG", "quality": 86}),
}
FRAMES, FRAME_SIZE, FPS = 64, (1280, 720), 2.0

_numbers = count(1)


@cache
def _drawn(size: tuple[int, int], noise: int) -> np.ndarray[Any, Any]:
    """(height, width, 3) uint8."""
    kind = Kind("image/png", size, noise, {"format": "PNG", "compress_level": 0})
    return np.asarray(Image.open(io.BytesIO(picture(kind, 0))))


def unlike(kind: Kind, number: int) -> bytes:
    """The file of picture `number`: one drawn picture, turned by so many rows and columns."""
    drawn = _drawn(kind.size, kind.noise)
    pixels = np.roll(drawn, (number, number), axis=(0, 1))  # 11,520 pictures of 1280x720
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, **kind.options)
    return buffer.getvalue()


def some(kind: Kind, number: int) -> list[tuple[str, int]]:
    """(data URL, bytes of the file) of new pictures: none that this process was given before."""
    contents = [unlike(kind, next(_numbers)) for _ in range(number)]
    return [(data_url(kind, content), len(content)) for content in contents]


def video(number: int) -> bytes:
    """An mp4 of FRAMES frames: a square that wanders over a slope. Needs OpenCV, which vLLM brings."""
    import cv2

    width, height = FRAME_SIZE
    slope = np.linspace(0, 200, width, dtype=np.uint8)[None, :, None].repeat(height, 0).repeat(3, 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), FPS, FRAME_SIZE)
        if not writer.isOpened():
            raise RuntimeError("OpenCV can't write mp4 here: its wheel brings ffmpeg; is opencv-python-headless there?")
        for frame in range(FRAMES):
            pixels = slope.copy()
            x, y = (number * 37 + frame * 8) % (width - 40), (number * 11 + frame * 4) % (height - 40)
            pixels[y : y + 40, x : x + 40] = (number % 256, frame * 3, 255 - number % 256)
            writer.write(pixels)
        writer.release()
        return path.read_bytes()


def video_part(content: bytes) -> dict[str, Any]:
    url = f"data:video/mp4;base64,{base64.b64encode(content).decode()}"
    return {"type": "video_url", "video_url": {"url": url}}
