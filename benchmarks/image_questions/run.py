# SPDX-License-Identifier: Apache-2.0
"""The second question about an image: cached tokens against the best possible.

python -m benchmarks.image_questions.run [--families gemma3 qwen3.5] [--requests 200] [--save]
"""

import argparse
from typing import Any

from benchmarks.machine import result_options, save_result
from benchmarks.sides import SIDES, run_worker

WORKER = "benchmarks.image_questions.worker"
FAMILIES = ("gemma3", "qwen3.5")
KINDS = ("workloads", "unique")


def arguments() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.image_questions.run", description=__doc__)
    parser.add_argument("--families", nargs="+", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--requests", type=int, default=200, help="of the kind unique")
    return result_options(parser)


def main() -> None:
    """Measure, print, and write the result with --save."""
    options = arguments().parse_args()
    result = {family: measure(family, options) for family in options.families}
    save_result(__file__, options, result)


def measure(family: str, options: argparse.Namespace) -> dict[str, Any]:
    """Both sides of one family; prints a line per row."""
    result: dict[str, Any] = {}
    for kind in options.kinds:
        task = {"kind": kind, "family": family} | ({"requests": options.requests} if kind == "unique" else {})
        result[kind] = {side: run_worker(WORKER, side, task) for side in SIDES}
        show = print_workloads if kind == "workloads" else print_unique
        show(family, result[kind])
    return result


def print_workloads(family: str, found: dict[str, Any]) -> None:
    for name in found["stock"]["workloads"]:
        rows = [found[side]["workloads"][name] for side in SIDES]
        stock, ours = (row["cached_tokens"] / row["best_tokens"] for row in rows)
        seconds, counters = [row["seconds"] for row in rows], rows[1]["counters"]
        print(
            f"{family} {name}: cached/best stock {stock:.3f}, mmcache {ours:.3f}; {seconds} s; {counters}", flush=True
        )


def print_unique(family: str, found: dict[str, Any]) -> None:
    hits = [found[side]["cached_tokens"] for side in SIDES]
    ratio = hits[1] / hits[0] if hits[0] else float("inf")
    counters = found["mmcache"]["counters"]
    print(f"{family} unique pictures: hit tokens {hits}, ratio {ratio:.3f}; {counters}", flush=True)


if __name__ == "__main__":
    main()
