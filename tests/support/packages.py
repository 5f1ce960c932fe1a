# SPDX-License-Identifier: Apache-2.0
"""Identities, and features as bytes, for the tests of the feature store. Imports no torch."""

import os
import random
import time
from pathlib import Path

from vllm_mmcache.components.features import tiers
from vllm_mmcache.components.features.identity import Identity
from vllm_mmcache.components.features.package import Shape, pack
from vllm_mmcache.storage.encryption import PLAIN, PlainCodec
from vllm_mmcache.storage.files import FileBackend
from vllm_mmcache.storage.redis_backend import RedisBackend
from vllm_mmcache.storage.tier import Tier

BUDGET_BYTES = 64 * 1024**2
SHAPE = Shape(16, 64, "bfloat16")
LARGE = Shape(4096, 1536, "bfloat16")
"""Three pieces as they are read and written, and twelve chunks as they are encrypted."""


def file_tier(
    place: str | Path,
    budget_bytes: int = BUDGET_BYTES,
    *,
    ttl_s: int = 0,
    rest_s: tuple[float, float] | None = None,
    codec: PlainCodec = PLAIN,
) -> Tier:
    """A tier of packages in a directory."""
    return Tier(tiers.FEATURES, FileBackend(place, tiers.FEATURES, budget_bytes, ttl_s=ttl_s), codec, rest_s)


def redis_tier(
    url: str,
    *,
    ttl_s: int = 0,
    timeout_s: float = 5.0,
    max_bytes: int = BUDGET_BYTES,
    rest_s: tuple[float, float] | None = None,
    codec: PlainCodec = PLAIN,
) -> Tier:
    """A tier of packages in Redis or Valkey."""
    backend = RedisBackend(url, tiers.FEATURES, ttl_s=ttl_s, timeout_s=timeout_s, max_bytes=max_bytes)
    return Tier(tiers.FEATURES, backend, codec, rest_s)


def identity(number: object = 0) -> Identity:
    return Identity(f"image-{number}", "weights", "processor", "bfloat16", "0/1")


def features(number: int = 0, shape: Shape = SHAPE) -> memoryview:
    """Random bytes that depend on number and shape alone; read only."""
    return memoryview(random.Random(number).randbytes(shape.num_bytes))


def packed(number: int = 0, shape: Shape = SHAPE) -> bytes:
    """The package of that number as bytes."""
    return pack(identity(number), shape, features(number, shape))


def save(tier: Tier, number: int, shape: Shape = SHAPE) -> bool:
    """Save the package of that number."""
    return tiers.save(tier, identity(number), shape, features(number, shape))


def load(tier: Tier, number: object, shape: Shape = SHAPE, seconds: float = 60) -> bytes | None:
    """What the tier has for that number, read into memory that holds other bytes, and has other bytes around it."""
    room = bytearray(b"\xa5" * (shape.num_bytes + 16))
    asked = identity(number)
    until = time.monotonic() + seconds
    filled = tiers.load(tier, asked, shape, lambda: memoryview(room)[8:-8], until)
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
