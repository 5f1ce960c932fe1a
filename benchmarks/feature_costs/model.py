# SPDX-License-Identifier: Apache-2.0
"""What loading an image's features costs beside making them: a model whose inputs are bandwidths and operations.

A load is a chain of stages, one after the other, which is the worst case: pieces that are read while others are copied
are faster. The tower's time is its matrix products, counted, by what a GPU does of them in a second. No torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import committed

INPUTS = Path(__file__).with_name("inputs.json")
BYTES_PER_VALUE = 2  # bfloat16


@dataclass(frozen=True)
class Package:
    """One image's features of a model."""

    model: str
    picture: str
    num_tokens: int
    num_bytes: int
    flops: float
    """Floating point operations of the tower."""


@dataclass(frozen=True)
class Inputs:
    """inputs.json, with the bandwidths that were measured."""

    said: Mapping[str, Any]
    measured: Mapping[str, float]
    """GB/s by name."""

    def rate(self, name: str, gpu: str) -> float:
        """Bytes a second of one medium; `h2d` is that of the GPU."""
        if name == "h2d":
            name = self.said["gpus"][gpu]["h2d"]
        rate = self.said["rates"][name]
        return 1e9 * float(rate["gb_s"] if "gb_s" in rate else self.measured[rate["measured"]] * rate.get("times", 1))

    def load_s(self, tier: str, num_bytes: int, gpu: str) -> float:
        """Seconds to load: a stage takes as long as the slowest of its media."""
        return sum(num_bytes / min(self.rate(name, gpu) for name in stage) for stage in self.said["tiers"][tier])

    def tower_s(self, flops: float, gpu: str) -> float:
        """Seconds of the tower, derived from the GPU's data sheet."""
        return flops / (self.said["gpus"][gpu]["tflops"] * 1e12 * self.said["efficiency"]["value"])

    def break_even(self, tier: str, package: Package, gpu: str) -> float:
        """How often the load fits into the tower's time; below 1 the tower is faster."""
        return self.tower_s(package.flops, gpu) / self.load_s(tier, package.num_bytes, gpu)

    def packages(self) -> list[Package]:
        """All models at all pictures, or token budgets."""
        return [package for name, model in self.said["models"].items() for package in self._of(name, model)]

    def _of(self, name: str, model: Mapping[str, Any]) -> list[Package]:
        tower = self.said["towers"][model["tower"]]
        if "soft_tokens" in model:
            shown = {f"{tokens:,} tokens": tokens for tokens in model["soft_tokens"]}
        else:
            side = tower["patch"] * tower["merge"]
            shown = {
                picture: round(width / side) * round(height / side)
                for picture, (width, height) in self.said["pictures"].items()
            }
        return [
            Package(
                name, picture, tokens, tokens * model["width"] * BYTES_PER_VALUE,
                tower_flops(tower, tokens, model["out"]),
            )
            for picture, tokens in shown.items()
        ]  # fmt: skip


def tower_flops(tower: Mapping[str, Any], num_tokens: int, out: int) -> float:
    """Matrix products of a vision tower for one image, two operations a multiplication.

    Each patch looks at all others. A merger makes a token of merge x merge patches, through one layer of their width.
    A patch is so many frames deep, an image repeated for it.
    """
    hidden, patches = tower["hidden"], num_tokens * tower["merge"] ** 2
    weights = 4 * hidden**2 + tower["matrices"] * hidden * tower["inner"]
    blocks = tower["layers"] * patches * (2 * weights + 4 * patches * hidden)
    embedding = 2 * patches * hidden * 3 * tower["patch"] ** 2 * tower["frames"]
    merged = hidden * tower["merge"] ** 2
    mergers = tower["mergers"] * num_tokens * 2 * merged * (merged + out)
    projection = 0 if tower["mergers"] else num_tokens * 2 * hidden * out
    return float(blocks + embedding + mergers + projection)


def measured_here() -> dict[str, Any]:
    """The committed result of measure.py: its bandwidths by name, `tower`, `compression` and where it comes from."""
    content = committed("feature_costs")
    rates = {name: counted["gb_s"]["here"] for name, counted in content["found"].items()}
    return {**content, **content["details"], "measured": rates}


def inputs_with(measured: Mapping[str, float]) -> Inputs:
    """The committed inputs, with these measured bandwidths."""
    return Inputs(json.loads(INPUTS.read_text()), measured)
