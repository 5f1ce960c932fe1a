# SPDX-License-Identifier: Apache-2.0
"""Identities and packages for the tests of the feature store."""

import os
from pathlib import Path

import torch

from vllm_mmcache.features.identity import Identity
from vllm_mmcache.features.package import FEATURES, GRID, Package

BUDGET_BYTES = 64 * 1024**2


def identity(number: object = 0) -> Identity:
    return Identity(f"image-{number}", "weights", "processor", "bfloat16", "0/1")


def package(number: int = 0, num_tokens: int = 16, hidden: int = 64) -> Package:
    """Random features that depend on `number` alone, with a grid."""
    drawn = torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(number))
    return Package.of({FEATURES: drawn.to(torch.bfloat16), GRID: torch.tensor([1, 4, num_tokens // 4])})


def same(left: Package | None, right: Package) -> bool:
    """Whether two packages are equal bit for bit."""
    return (
        left is not None
        and left.tensors.keys() == right.tensors.keys()
        and all(bits(left.tensors[name]) == bits(right.tensors[name]) for name in right.tensors)
    )


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return tensor.dtype, tensor.shape, raw


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
