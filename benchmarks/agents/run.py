# SPDX-License-Identifier: Apache-2.0
"""Agents and pipelines: tokens reused of the best possible, runs of the vision tower, time of a request.

python -m benchmarks.agents.run [--families qwen3-vl qwen3.5 gemma3] [--save]

Targets: at least 0.98 of the best possible; the last quarter of the photographs costs at most
1.1 of the first.
"""

import argparse
from statistics import median
from typing import Any

from benchmarks.agents.workloads import WORKLOADS
from benchmarks.machine import result_options, save_result
from benchmarks.sides import SIDES, run_worker

FAMILIES = ("qwen3-vl", "qwen3.5", "gemma3")


def arguments() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents.run", description=__doc__)
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    return result_options(parser)


def main() -> None:
    """Measure, print, and write the result with --save."""
    options = arguments().parse_args()
    result: dict[str, Any] = {}
    for family in options.families:
        task = {"kind": "workloads", "family": family, "names": options.workloads}
        found = {side: run_worker("benchmarks.agents.worker", side, task) for side in SIDES}
        for name in options.workloads:
            row = result.setdefault(family, {})[name] = measure({side: found[side][name] for side in SIDES})
            print(f"{family}, {name}: {row}", flush=True)
    save_result(__file__, options, result)


def measure(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Both sides of a workload, and whether their answers are equal."""
    texts = [found[side].pop("token_ids") for side in SIDES]
    row: dict[str, Any] = {"answers_equal": sum(a == b for a, b in zip(*texts, strict=True)), "requests": len(texts[0])}
    for side in SIDES:
        seconds = found[side].pop("seconds")
        quarter = len(seconds) // 4
        first, last = median(seconds[1 : quarter + 1]), median(seconds[-quarter:])
        row[side] = {**found[side], "median_s": round(median(seconds), 4), "last_to_first": round(last / first, 3)}
    row["ratio"] = round(row["mmcache"]["median_s"] / row["stock"]["median_s"], 3)
    return row


if __name__ == "__main__":
    main()
