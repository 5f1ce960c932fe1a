# SPDX-License-Identifier: Apache-2.0
"""Identities, and features as bytes, for the tests of the feature store. Imports no torch."""

import os
import random
import time
from pathlib import Path

from vllm_mmcache.components.features.identity import Identity
from vllm_mmcache.components.features.lasting import LastingTier
from vllm_mmcache.components.features.package import Shape, pack

BUDGET_BYTES = 64 * 1024**2
SHAPE = Shape(16, 64, "bfloat16")


def identity(number: object = 0) -> Identity:
    return Identity(f"image-{number}", "weights", "processor", "bfloat16", "0/1")


def features(number: int = 0, shape: Shape = SHAPE) -> memoryview:
    """Random bytes that depend on number and shape alone; read only."""
    return memoryview(random.Random(number).randbytes(shape.num_bytes))


def packed(number: int = 0, shape: Shape = SHAPE) -> bytes:
    """The package of that number as bytes."""
    return pack(identity(number), shape, features(number, shape))


def save(tier: LastingTier, number: int, shape: Shape = SHAPE) -> bool:
    """Save the package of that number."""
    return tier.save(identity(number), shape, features(number, shape))


def load(tier: LastingTier, number: object, shape: Shape = SHAPE, seconds: float = 60) -> bytes | None:
    """What the tier has for that number, read into memory that holds other bytes, and has other bytes around it."""
    room = bytearray(b"\xa5" * (shape.num_bytes + 16))
    asked = identity(number)
    until = time.monotonic() + seconds
    filled = tier.load(asked, shape, lambda: memoryview(room)[8:-8], until)
    assert room[:8] == room[-8:] == b"\xa5" * 8
    return bytes(room[8:-8]) if filled else None


def held_bytes(place: Path) -> int:
    """Bytes of all files of a store but its lock, whatever their names are; files may vanish meanwhile."""
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size if name != "lock" else 0
            except FileNotFoundError:
                continue
    return total
