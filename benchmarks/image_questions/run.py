# SPDX-License-Identifier: Apache-2.0
"""The second question about an image: cached tokens against the best possible.

python -m benchmarks.image_questions.run [--requests 200] [--save]
"""

import argparse
from typing import Any

from benchmarks.machine import save_result
from benchmarks.sides import SIDES, run_worker

WORKER = "benchmarks.image_questions.worker"
FAMILIES = ("gemma3", "qwen3.5")


def main() -> None:
    """Measure, print, and write the result with --save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.image_questions.run", description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    result = {family: measure(family, options) for family in FAMILIES}
    save_result(__file__, options, result)


def measure(family: str, options: argparse.Namespace) -> dict[str, Any]:
    """Both sides of one family; prints a line per row."""
    result: dict[str, Any] = {}
    for kind in ("workloads", "unique"):
        task = {"kind": kind, "family": family}
        if kind == "unique":
            task["requests"] = options.requests
        result[kind] = {side: run_worker(WORKER, side, task) for side in SIDES}
    for name in result["workloads"]["stock"]["workloads"]:
        rows = [result["workloads"][side]["workloads"][name] for side in SIDES]
        stock, ours = (row["cached_tokens"] / row["best_tokens"] for row in rows)
        seconds = [row["seconds"] for row in rows]
        counters = rows[1]["counters"]
        print(
            f"{family} {name}: cached/best stock {stock:.3f}, mmcache {ours:.3f}; {seconds} s; {counters}", flush=True
        )
    hits = [result["unique"][side]["cached_tokens"] for side in SIDES]
    ratio = hits[1] / hits[0] if hits[0] else float("inf")
    counters = result["unique"]["mmcache"]["counters"]
    print(f"{family} unique pictures: hit tokens {hits}, ratio {ratio:.3f}; {counters}", flush=True)
    return result


if __name__ == "__main__":
    main()
