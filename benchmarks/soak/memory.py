# SPDX-License-Identifier: Apache-2.0
"""Memory over thousands of distinct images: what each process of a server has grown by, step by step.

python -m benchmarks.soak.memory [--distinct 2000] [--images 20] [--output DIRECTORY]

The caches that may fill for hours are made as small as in the load test, so that they are full after a few hundred.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.load.run import ARGS, SMALL_CACHES
from benchmarks.processes import MIB
from benchmarks.servers import zoo_server
from benchmarks.sides import SIDES
from benchmarks.warm_turn.pictures import Kind
from benchmarks.warm_turn.side import memory
from vllm_mmcache.zoo import FIRST_FAMILIES, build_cached

PICTURE = Kind("image/png", (320, 320), 2, {"format": "PNG"})
STEPS = 10


def main() -> None:
    """Measure both sides, print, and write memory.json with --output."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak.memory", description=__doc__)
    parser.add_argument("--distinct", type=int, default=2000)
    parser.add_argument("--images", type=int, default=20, help="of a request")
    parser.add_argument("--family", default="qwen3-vl", choices=FIRST_FAMILIES)
    parser.add_argument("--output", type=Path, metavar="DIRECTORY")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = build_cached(options.family, Path(folder))
        for side in SIDES:
            with zoo_server(model, side, images=options.images, args=ARGS, env=SMALL_CACHES) as server:
                seen = memory(server, PICTURE, options.images, options.distinct, STEPS)
            result[side] = {
                process: [(images, round(sizes[process] / MIB, 1)) for images, sizes in seen] for process in seen[0][1]
            }
            print(f"{side}, (distinct images, MiB): {result[side]}", flush=True)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "memory.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
