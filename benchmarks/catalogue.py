# SPDX-License-Identifier: Apache-2.0
"""Every benchmark, as catalogue.toml has it."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CATALOGUE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
ABOUT = CATALOGUE.pop("about")
NOT_ON_GPU = {name: reason for reason, names in ABOUT["not_on_gpu"].items() for name in names}


@dataclass(frozen=True)
class Benchmark:
    """`short` are the options that differ in the short form. `not_on_gpu`: why `make gpu-check` leaves it out."""

    what: str
    options: dict[str, Any]
    short: dict[str, Any]
    rows: list[Any]
    not_on_gpu: str
    in_bench: bool  # `make bench` runs it unless others are named
    targets: list[Any] = field(default_factory=list)


BENCHMARKS = {
    name: Benchmark(**entry, not_on_gpu=NOT_ON_GPU.get(name, ""), in_bench=name not in ABOUT["not_in_bench"])
    for name, entry in CATALOGUE.items()
}
