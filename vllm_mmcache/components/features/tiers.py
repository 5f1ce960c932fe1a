# SPDX-License-Identifier: Apache-2.0
"""Packages of features in the tiers beyond RAM: where they lie there, how they are written, read and checked.

The tiers know bytes alone (storage/tier.py). Engine process, in reader and writer threads; the command line.
"""

from collections.abc import Callable

from vllm_mmcache.base.errors import StoreCorrupt
from vllm_mmcache.components.features.identity import FORMAT, Identity
from vllm_mmcache.components.features.package import Check, Shape, head, unpack
from vllm_mmcache.metrics.counters import TIER_COUNTERS
from vllm_mmcache.storage.backend import Buffer
from vllm_mmcache.storage.encryption import PlainCodec
from vllm_mmcache.storage.kind import Kind
from vllm_mmcache.storage.tier import Tier, pieces

FEATURES = Kind(
    name="features",
    format=FORMAT,
    said="feature store {}",
    counters=TIER_COUNTERS,
    rejected="set_aside",
    disk_budget="store_disk_bytes",
    suffix=".safetensors",
)


def load(tier: Tier, identity: Identity, shape: Shape, reserve: Callable[[], memoryview | None], until: float) -> bool:
    """Fill the memory that `reserve` gives with the features of exactly this identity, as Tier.load. Never raises."""
    return tier.load(key_of(identity), Check(identity, shape), reserve, until)


def save(tier: Tier, identity: Identity, shape: Shape, features: memoryview) -> bool:
    """Keep these features, `shape.num_bytes` bytes; whether they are kept, now or since before. Never raises."""

    def content() -> list[Buffer]:
        return [head(identity, shape, features), *pieces(features)]

    return tier.put(key_of(identity), content, shape.num_bytes)


def check(name: bytes, content: bytearray, codec: PlainCodec) -> None:
    """Look at every byte of a package that lies under `name`. Raises: StoreCorrupt, StoreForeign."""
    identity, _, _ = unpack(content)
    if (expected := codec.name(key_of(identity))) != name:
        raise StoreCorrupt(f"another package: its identity gives the key {expected.hex()}")


def key_of(identity: Identity) -> bytes:
    """The key of a package in the tiers."""
    return bytes.fromhex(identity.key)
