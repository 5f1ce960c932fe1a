# SPDX-License-Identifier: Apache-2.0
"""Draws one coloured shape on a grey, noisy background, in any place and size.

Same generator state, same pixels (with the same Pillow and numpy; other versions may differ in single grey levels).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

SIZE_PIXELS = 96  # width and height as the model sees them; the processor resizes every square picture to this

COLOURS = {
    "red": (215, 25, 30),
    "orange": (255, 140, 0),
    "yellow": (245, 230, 30),
    "green": (20, 150, 40),
    "cyan": (30, 215, 225),
    "blue": (25, 50, 210),
    "purple": (125, 30, 160),
    "pink": (255, 130, 190),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")


@dataclass(frozen=True)
class Thing:
    """What is in a picture."""

    colour: str
    shape: str

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"


THINGS = tuple(Thing(colour, shape) for colour in COLOURS for shape in SHAPES)


def stream(*names: str | int) -> np.random.Generator:
    """Random numbers of their own for these names; other names, other numbers."""
    import numpy as np

    digest = hashlib.sha256("\0".join(map(str, names)).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))


def _polygon(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """Corners of an angular shape that fits a circle of this radius."""

    def at(turn: float, distance: float) -> tuple[float, float]:
        angle = 2 * math.pi * turn - math.pi / 2  # from the top, clockwise
        return x + distance * radius * math.cos(angle), y + distance * radius * math.sin(angle)

    if shape == "square":
        return [at((2 * i + 1) / 8, 1.0) for i in range(4)]
    if shape == "triangle":
        return [at(i / 3, 1.0) for i in range(3)]
    if shape == "star":
        return [at(i / 10, 1.0 if i % 2 == 0 else 0.42) for i in range(10)]
    assert shape == "cross", shape
    arm = math.atan2(0.28, 0.96) / (2 * math.pi)  # half the width of an arm by its length
    inner = 0.28 * math.sqrt(2)
    corners = [((i / 4 - arm, 1.0), (i / 4 + arm, 1.0), ((2 * i + 1) / 8, inner)) for i in range(4)]
    return [at(*corner) for four in corners for corner in four]


def draw(random: np.random.Generator, thing: Thing, size_pixels: int = SIZE_PIXELS) -> Image.Image:
    """A picture of the thing, size_pixels wide and high, RGB.

    Place, size, background, shade of the colour and noise come from `random`.
    """
    import numpy as np
    from PIL import Image, ImageDraw

    scale = 2 * size_pixels  # drawn twice as large: edges come out smooth
    radius = random.uniform(0.24, 0.42) * scale
    x, y = random.uniform(radius, scale - radius, 2)
    background = int(random.integers(40, 216))
    tint = random.integers(-10, 11, 3)
    shade = random.integers(-18, 19, 3)
    fill = tuple(int(value) for value in np.clip(np.array(COLOURS[thing.colour]) + shade, 0, 255))
    paper = tuple(int(value) for value in background + tint)
    image = Image.new("RGB", (scale, scale), paper)
    pen = ImageDraw.Draw(image)
    box = [x - radius, y - radius, x + radius, y + radius]
    if thing.shape in ("circle", "ring"):
        pen.ellipse(box, fill=fill)
        if thing.shape == "ring":
            hole = 0.55 * radius
            pen.ellipse([x - hole, y - hole, x + hole, y + hole], fill=paper)
    else:
        pen.polygon(_polygon(thing.shape, x, y, radius), fill=fill)
    pixels = np.asarray(image.reduce(2)).astype(np.float32)
    pixels += random.normal(0, random.uniform(2, 8), pixels.shape)
    return Image.fromarray(np.clip(pixels.round(), 0, 255).astype(np.uint8))
