# SPDX-License-Identifier: Apache-2.0
"""Many conversations at once for minutes: failures, requests per second, times, and memory over time.

python -m benchmarks.load.run [--seconds 300] [--conversations 16] [--family qwen3-vl] [--sides stock mmcache] [--save]

Real servers, one after the other, on the cores that the clients use, too. A fifth of the time is warm-up, and not
measured. The caches that may fill for hours are made small, on both sides alike, so that they are full after it.
"""

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import quantiles
from typing import Any

from benchmarks.load.talks import IMAGES, Load
from benchmarks.machine import result_options, save_result
from benchmarks.processes import MemoryWatch
from benchmarks.servers import zoo_server
from benchmarks.sides import SIDES
from vllm_mmcache.zoo import FIRST_FAMILIES, ZooOptions, build_cached

MAX_PIXELS = 512 * 512  # 256 tokens a screenshot, so that 16 conversations are more than two cores can't serve
WARM_UP = 0.2  # of the time
SMALL_CACHES = {"MMCACHE_FEATURE_RAM_BYTES": "64MiB"}
ARGS = ("--mm-processor-cache-gb", "0.25", "--num-gpu-blocks-override", "2048")  # twice what 16 conversations need
NUM_ERRORS = 5  # kept in the result


def arguments() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load.run", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300, help="of load, on each side")
    parser.add_argument("--conversations", type=int, default=16, help="at once")
    parser.add_argument("--family", default="qwen3-vl", choices=FIRST_FAMILIES)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    return result_options(parser)


def main() -> None:
    """Measure, print, and write the result with --save; exit code 1 where a request failed."""
    options = arguments().parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = build_cached(options.family, Path(folder), options=ZooOptions(max_pixels=MAX_PIXELS))
        for side in options.sides:
            result[side] = measure(model, side, options)
            show(side, result[side])
    save_result(__file__, options, result)
    failed = sum(found["failed"] for found in result.values())
    sys.exit(f"{failed} requests failed: {[found['errors'] for found in result.values()]}" if failed else 0)


def measure(model: Path, side: str, options: argparse.Namespace) -> dict[str, Any]:
    """One side under load. Units: seconds."""
    dtype = "bfloat16" if options.family == "qwen3.5" else "float32"
    args = (*ARGS, "--dtype", dtype)
    with zoo_server(model, side, images=IMAGES, args=args, env=SMALL_CACHES) as server:
        load = Load(server.url, options.conversations)
        with MemoryWatch(server) as watch:
            load.run(options.seconds)
    warm_up_s = WARM_UP * options.seconds
    measured = [asdict(asked) for asked in load.asked if asked.start_s >= warm_up_s]
    if len(measured) < 2:
        raise RuntimeError(f"{len(measured)} requests after a warm-up of {warm_up_s} s; failures: {load.failures[:3]}")
    end_s = max(asked["start_s"] + asked["whole_s"] for asked in measured)
    return {
        "requests": len(load.asked),
        "failed": len(load.failures),
        "errors": sorted(set(load.failures))[:NUM_ERRORS],
        "images": load.num_images,
        "warm_up_s": warm_up_s,
        "requests_measured": len(measured),
        "requests_per_s": round(len(measured) / (end_s - warm_up_s), 3),
        "first_token_s": percentiles([asked["first_token_s"] for asked in measured]),
        "whole_s": percentiles([asked["whole_s"] for asked in measured]),
        "prompt_tokens": sum(asked["prompt_tokens"] for asked in measured),
        "cached_tokens": sum(asked["cached_tokens"] for asked in measured),
        "memory": watch.growth(warm_up_s),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    hundredths = quantiles(seconds, n=100, method="inclusive")
    return {"p50": round(hundredths[49], 4), "p99": round(hundredths[98], 4)}


def show(side: str, found: dict[str, Any]) -> None:
    memory = {
        process: {name: value for name, value in sizes.items() if name != "samples_s_mib"}
        for process, sizes in found["memory"].items()
    }
    print(f"{side}: { ({**found, 'memory': memory}) }", flush=True)


if __name__ == "__main__":
    main()
