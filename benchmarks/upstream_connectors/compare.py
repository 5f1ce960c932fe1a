# SPDX-License-Identifier: Apache-2.0
"""The feature store beside vLLM's own encoder-cache connectors: rotation, restart, two faults. Model runner V2, CPU.

python -m benchmarks.upstream_connectors.compare [--images 5] [--size 512] [--save]

V2's kernels run in Triton's interpreter there, so a tower takes seconds and times say little: runs of the tower count.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.machine import result_options, save_result
from benchmarks.sides import run_worker
from benchmarks.upstream_connectors.worker import PACKAGE_BYTES
from tests import runner_v2

WORKER = "benchmarks.upstream_connectors.worker"
SIDES = ("stock", "ECCPUConnector", "ECExampleConnector", "mmcache")


def arguments() -> argparse.ArgumentParser:
    """The benchmark's options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.upstream_connectors.compare", description=__doc__)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--images", type=int, default=5, help="5 of 256 tokens are more than vLLM's own cache holds")
    parser.add_argument("--size", type=int, default=512, help="pixels of an image's side")
    return result_options(parser)


def main() -> None:
    """Measure, print, and write the result with --save."""
    options = arguments().parse_args()
    result = {side: measure(side, options) for side in options.sides}
    save_result(__file__, options, result)


def measure(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """Two processes after each other on one place: the second round of the first, and the first of the second."""
    with tempfile.TemporaryDirectory() as place:
        questions = {"kind": "rotation", "images": options.images, "size": options.size}
        filled = run(side, place, {**questions, "rounds": 2}, 1024**3)
        again = run(side, place, {**questions, "rounds": 1}, 1024**3)
    found = {
        name: {"tower_runs": one["tower_runs"][round_], "median_s": statistics.median(one["seconds"][round_])}
        for name, one, round_ in (("first", filled, 0), ("rotation", filled, 1), ("restart", again, 0))
    }
    if side in ("ECCPUConnector", "mmcache"):  # the others have no limit
        with tempfile.TemporaryDirectory() as place:
            found["faults"] = run(side, place, {"kind": "faults"}, 2 * PACKAGE_BYTES)
    print(side, found, flush=True)
    return found


def run(side: str, place: str, task: dict[str, Any], num_bytes: int) -> Any:
    """One task in a process of its own. num_bytes: what a side may keep in RAM."""
    extra = {
        "ECCPUConnector": {"ec_cpu_bytes": num_bytes},
        "ECExampleConnector": {"shared_storage_path": str(Path(place) / "features")},
    }
    settings = {"features": True, "store": str(Path(place) / "store"), "feature_ram_bytes": num_bytes}
    task = task | {
        "family": "qwen3-vl", "zoo": place, "connector": side if side in extra else "", "extra": extra.get(side, {}),
        "settings": settings if side == "mmcache" else {},
    }  # fmt: skip
    return run_worker(WORKER, "mmcache" if side == "mmcache" else "stock", task, runner_v2.environment())


if __name__ == "__main__":
    main()
