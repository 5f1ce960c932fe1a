# SPDX-License-Identifier: Apache-2.0
"""The one form of a result: numbers by case, by what is counted, by side; committed in benchmarks/results/<name>.json.

What is counted carries its unit: time_s, cpu_s, cached_tokens, tower_runs. Sides are `stock` and `mmcache`, but where
a benchmark names others. Samples and other details lie beside the numbers, in no common form.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import provenance

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "results"

Numbers = Mapping[str, float]  # by side
Found = dict[str, dict[str, dict[str, float]]]  # by case, by what is counted, by side


@dataclass
class Result:
    """What a benchmark has found so far. `problems`: what must not be, in words."""

    found: Found = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, case: str, what: str, numbers: Numbers) -> None:
        """Keep one number of each side, and print it with its ratio to stock's."""
        self.found.setdefault(case, {})[what] = dict(numbers)
        stock = numbers.get("stock", 0)
        shown = (f"{side} {number:.6g}" + (f" ({number / stock:.3f})" if stock and side != "stock" else "")
                 for side, number in numbers.items())  # fmt: skip
        print(f"{case}: {what} {', '.join(shown)}", flush=True)

    def add_sides(self, sides: Mapping[str, Mapping[tuple[str, str], float]]) -> None:
        """Keep what each side has found, by case and what is counted."""
        for key in dict.fromkeys(key for found in sides.values() for key in found):
            self.add(*key, {side: found[key] for side, found in sides.items() if key in found})


def save(path: Path, result: Result, options: Mapping[str, Any]) -> None:
    """Write a result with where it comes from. Raises: ValueError for a number that JSON has not."""
    numbers = [number for case in result.found.values() for sides in case.values() for number in sides.values()]
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{path.stem} found a number that is none: {result.found}")
    content = {**provenance(), "options": dict(options), "found": result.found, "details": result.details}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def committed(name: str) -> dict[str, Any]:
    """The committed result of a benchmark."""
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return content
