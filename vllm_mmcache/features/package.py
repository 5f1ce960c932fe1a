# SPDX-License-Identifier: Apache-2.0
"""One image's encoder output as a typed package, and its form as bytes: safetensors with a checked record.

The record (format, identity, and of each tensor dtype, shape and length) lies in the safetensors metadata beside a
BLAKE3 checksum over the record and every tensor. docs/features.md describes the bytes. Reading believes nothing:
what does not fit raises StoreCorrupt, whatever the bytes are. Runs in the worker, and in the store's writer thread.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from blake3 import blake3
from safetensors.torch import load, save

from vllm_mmcache.errors import StoreCorrupt
from vllm_mmcache.features.identity import Identity
from vllm_mmcache.features.record import FORMAT, Record, read_record

FEATURES = "features"
GRID = "image_grid_thw"


@dataclass(frozen=True, eq=False)
class Package:
    """Tensors by name, on the CPU. Immutable by convention: the RAM tier serves the same tensors many times.

    Shapes: FEATURES (num_tokens, hidden * (1 + num_deepstack)); GRID, where the model has one, (3,) int64.
    """

    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> "Package":
        """A package that owns its memory: contiguous, on the CPU, and not a view into a larger batch.

        Shapes: any, on any device. Copies only what is not so already; a copy from a device waits for it.
        """
        return cls({name: _owned(tensor) for name, tensor in tensors.items()})

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def pack(identity: Identity, package: Package) -> bytes:
    """The bytes of a package, the same on disk and in Redis. Bit-identical after `unpack`."""
    record = json.dumps(
        {
            "identity": asdict(identity),
            "tensors": {name: _shape(tensor) for name, tensor in package.tensors.items()},
        },
        separators=(",", ":"),
    )
    metadata = {"format": FORMAT, "record": record, "blake3": _checksum(record, package.tensors)}
    packed: bytes = save(dict(package.tensors), metadata)
    return packed


def unpack(packed: bytes, asked: Identity | None = None) -> tuple[Identity, Package]:
    """Check every byte of `packed` and give back what it holds.

    Raises: StoreCorrupt when anything is off, or when `asked` is given and is not the stored identity.
    """
    record = read_record(packed)
    if asked is not None and record.identity != asked:
        raise StoreCorrupt(f"another package: its identity gives the key {record.identity.key}, asked was {asked.key}")
    try:
        package = Package(load(packed))
    except Exception as error:  # bytes from outside: whatever the parser raises, they are no package
        raise StoreCorrupt(f"not readable as safetensors: {error}") from None
    _check(record, package)
    return record.identity, package


def _check(record: Record, package: Package) -> None:
    seen = {name: _shape(tensor) for name, tensor in package.tensors.items()}
    if seen != record.tensors:
        raise StoreCorrupt(f"tensors {seen}, expected {record.tensors}")
    if _checksum(record.text, package.tensors) != record.checksum:
        raise StoreCorrupt("the checksum does not fit the bytes")


def _shape(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "num_bytes": tensor.nbytes,
    }


def _checksum(record: str, tensors: Mapping[str, torch.Tensor]) -> str:
    digest = blake3(record.encode())
    for name in sorted(tensors):
        if tensors[name].numel():
            digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    mine = tensor.detach().to("cpu").contiguous()
    # A view keeps the storage of its whole batch alive, which no budget would see.
    return mine.clone() if mine.untyped_storage().nbytes() > mine.nbytes else mine
