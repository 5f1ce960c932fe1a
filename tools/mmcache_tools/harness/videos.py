# SPDX-License-Identifier: Apache-2.0
"""Videos made of their name, for checks and tests: the frames, and how a client sends them."""

import base64
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vllm_mmcache.exactness.pictures import ellipses


def frames(name: str, num_frames: int, size: tuple[int, int] = (128, 96)) -> list[Image.Image]:
    """Frames whose ellipses `name` and the frame's number choose. size is (width, height) in pixels."""
    return [ellipses(f"{name} {number}", size) for number in range(num_frames)]


def mp4(pictures: Sequence[Image.Image], fps: float = 4.0) -> bytes:
    """An MP4 file of MPEG-4 frames, `fps` of them a second. Not lossless: what is decoded is close to `pictures`."""
    import cv2

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, pictures[0].size)
        for picture in pictures:
            writer.write(np.ascontiguousarray(np.asarray(picture.convert("RGB"))[:, :, ::-1]))
        writer.release()
        return path.read_bytes()


def jpegs(pictures: Sequence[Image.Image]) -> str:
    """The text of a `video/jpeg`: each frame a JPEG file as base64, with commas."""

    def text(picture: Image.Image) -> str:
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=90)
        return base64.b64encode(buffer.getvalue()).decode()

    return ",".join(map(text, pictures))
