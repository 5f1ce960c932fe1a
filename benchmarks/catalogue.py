# SPDX-License-Identifier: Apache-2.0
"""Every benchmark, as catalogue.toml has it."""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

CATALOGUE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
ABOUT: dict[str, Any] = CATALOGUE["about"]
NOT_ON_GPU = {name: reason for reason, names in ABOUT["not_on_gpu"].items() for name in names}


class Benchmark(NamedTuple):
    """`short` are the options that differ in the short form. `not_on_gpu`: why `make gpu-check` leaves it out."""

    what: str
    options: dict[str, Any]
    short: dict[str, Any]
    not_on_gpu: str
    in_bench: bool  # `make bench` runs it unless others are named


BENCHMARKS = {
    name: Benchmark(what, CATALOGUE["options"][name], CATALOGUE["short"][name], NOT_ON_GPU.get(name, ""),
                    name not in ABOUT["not_in_bench"])
    for name, what in CATALOGUE["what"].items()
}  # fmt: skip


def command(name: str) -> str:
    """The target of make that runs a benchmark, as the tables name it."""
    named: str = ABOUT["commands"].get(name, f"bench-{name.replace('_', '-')}")
    return named


def listing() -> str:
    """A line of each benchmark: its name, its target and what it asks."""
    return "\n".join(f"{name:20} make {command(name):26} {one.what}" for name, one in BENCHMARKS.items())
