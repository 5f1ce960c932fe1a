# SPDX-License-Identifier: Apache-2.0
"""What the first request about images costs: prompts of which nothing is cached, stock and plugin.

python -m benchmarks.cold_requests.run [--families gemma3 qwen3.5 qwen3-vl] [--rounds 5] [--repeats 4] [--save]

Two processes of the same side differ by several per cent in time, so each side is timed in several, in turn. What a
room costs is smaller than that; it is measured in one process, with the room on and off in turn.
"""

import argparse
from typing import Any

from benchmarks.machine import result_options, save_result
from benchmarks.sides import SIDES, compare, run_worker

WORKER = "benchmarks.cold_requests.worker"
FAMILIES = ("gemma3", "qwen3.5", "qwen3-vl")


def arguments() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_requests.run", description=__doc__)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--rounds", type=int, default=5, help="requests of a case in a process")
    parser.add_argument("--repeats", type=int, default=4, help="processes of each side")
    parser.add_argument("--pairs", type=int, default=20, help="requests of a case with a room on and off")
    return result_options(parser)


def main() -> None:
    """Measure, print, and write the result with --save."""
    options = arguments().parse_args()
    result = {family: measure(family, options) for family in options.families}
    save_result(__file__, options, result)


def measure(family: str, options: argparse.Namespace) -> dict[str, Any]:
    """Both sides of one family; prints a line per case."""
    times: dict[str, dict[str, list[float]]] = {side: {} for side in SIDES}
    for _ in range(options.repeats):
        for side in SIDES:
            task = {"kind": "cold", "family": family, "rounds": options.rounds}
            for case, seconds in run_worker(WORKER, side, task).items():
                times[side].setdefault(case, []).extend(seconds)
    result: dict[str, Any] = {
        case: compare(f"{family}, {case}", {side: times[side][case] for side in SIDES}) for case in times["stock"]
    }
    result["in_turn"] = run_worker(WORKER, "mmcache", {"kind": "in_turn", "family": family, "rounds": options.pairs})
    print(f"{family}, a room on / off in one process: {result['in_turn']}", flush=True)
    return result


if __name__ == "__main__":
    main()
