# SPDX-License-Identifier: Apache-2.0
"""Many images in rotation: time of a question in rounds 2 and 3, runs of the vision tower, and what saving costs.

python -m benchmarks.gallery.run [--families qwen3-vl gemma4] [--images 20] [--size 1024] [--repeats 2] [--save]
"""

import argparse
from typing import Any

from benchmarks.gallery.shapes import MEASURED
from benchmarks.machine import result_options, save_result
from benchmarks.sides import SIDES, compare, run_worker
from vllm_mmcache.zoo import FAMILIES

WORKER = "benchmarks.gallery.worker"


def arguments() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gallery.run", description=__doc__)
    parser.add_argument("--families", nargs="+", default=MEASURED, choices=FAMILIES)
    parser.add_argument("--images", type=int, default=20)
    parser.add_argument("--size", type=int, default=1024, help="pixels of an image's side")
    parser.add_argument("--repeats", type=int, default=2)
    return result_options(parser)


def main() -> None:
    """Measure, print, and write the result with --save."""
    options = arguments().parse_args()
    result = {family: measure(family, options) for family in options.families}
    save_result(__file__, options, result)


def measure(family: str, options: argparse.Namespace) -> dict[str, Any]:
    """Both sides of one family, in turn; prints a line per row."""
    common = {"family": family, "images": options.images, "size": options.size}
    later: dict[str, list[float]] = {side: [] for side in SIDES}
    cold: dict[str, list[float]] = {side: [] for side in SIDES}
    tower: dict[str, int] = dict.fromkeys(SIDES, 0)
    for _ in range(options.repeats):
        for side in SIDES:
            found = run_worker(WORKER, side, {"kind": "rotation", "rounds": 3, **common})
            later[side] += [seconds for round_ in found["seconds"][1:] for seconds in round_]
            tower[side] += sum(found["tower_runs"][1:])
            found = run_worker(WORKER, side, {"kind": "all_new", "with_disk": True, **common})
            cold[side] += found["seconds"][0]
    result: dict[str, Any] = {"tower_runs_in_rounds_2_and_3": tower}
    for name, seconds in (("rounds_2_and_3", later), ("cold_with_saving", cold)):
        result[name] = compare(f"{family} {name}", seconds)
    print(f"{family} tower runs in rounds 2 and 3: {tower}", flush=True)
    return result


if __name__ == "__main__":
    main()
