# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 on the CPU, stock and plugin: exactness, splits under load, the endless request, prefill time.

python -m benchmarks.gemma3_attention.run [--steps 2000] [--rounds 15] [--repeats 8] [--save]
"""

import argparse
import json
import statistics
from typing import Any

from benchmarks.machine import result_options, save_result
from benchmarks.sides import SIDES, run_worker

WORKER = "benchmarks.gemma3_attention.worker"


def arguments() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gemma3_attention.run", description=__doc__)
    parser.add_argument("--windows", type=int, nargs="+", default=[128, 512, 1024], help="sliding windows, in tokens")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=8, help="processes of each side that are timed")
    return result_options(parser)


def main() -> None:
    """Measure, print a table, and write the result with --save."""
    options = arguments().parse_args()

    result: dict[str, Any] = {}
    times: dict[str, dict[str, list[float]]] = {side: {"images": [], "text": []} for side in SIDES}
    for _ in range(options.repeats):
        for side in SIDES:
            for kind, seconds in run_worker(WORKER, side, {"kind": "prefill", "rounds": options.rounds}).items():
                times[side][kind] += seconds
    for kind in ("images", "text"):
        stock, ours = (statistics.median(times[side][kind]) for side in SIDES)
        result[f"prefill_{kind}"] = {"stock_cpu_s": stock, "mmcache_cpu_s": ours, "ratio": ours / stock}
        print(f"prefill {kind:6} stock {stock:.4f} s  mmcache {ours:.4f} s  ratio {ours / stock:.3f}", flush=True)
    task = {"kind": "correctness", "windows": options.windows, "steps": options.steps}
    for side in SIDES:
        result[side] = run_worker(WORKER, side, task)
        print(side, json.dumps(result[side]), flush=True)
    save_result(__file__, options, result)


if __name__ == "__main__":
    main()
