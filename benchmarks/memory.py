# SPDX-License-Identifier: Apache-2.0
"""Memory over thousands of distinct images: what each process of a server has grown by, step by step.

The caches that may fill for hours are made as small as in the load test, so that they are full after a few hundred.
"""

import tempfile
from argparse import Namespace
from pathlib import Path

from benchmarks.pictures import Kind
from benchmarks.processes import MIB
from benchmarks.results import Result
from benchmarks.servers import SMALL_ARGS, SMALL_CACHES, counters, memory, zoo_server
from vllm_mmcache.zoo import build_cached

STEPS = 10


def measure(options: Namespace) -> Result:
    """MiB of both sides by the number of images that were seen; then what an image took in the second half."""
    result, seen = Result(), {}
    kind = Kind("image/png", (options.size, options.size), 2, {"format": "PNG"})
    with tempfile.TemporaryDirectory() as folder:
        model = build_cached(options.family, Path(folder))
        for side in options.sides:
            with zoo_server(model, side, images=options.images, args=SMALL_ARGS, env=SMALL_CACHES) as server:
                seen[side] = memory(server, kind, options.images, options.distinct, STEPS)
                result.details[side] = counters(server.url)
    for number, (images, _) in enumerate(next(iter(seen.values()))):
        for process in ("api_server", "engine"):
            sizes = {side: round(found[number][1][process] / MIB, 1) for side, found in seen.items()}
            result.add(f"{images} images", f"{process}_mib", sizes)
    for process in ("api_server", "engine"):
        for what, at in (("start_mib", 0), ("end_mib", -1)):
            result.add(process, what, {side: round(found[at][1][process] / MIB, 1) for side, found in seen.items()})
        halves = {side: (found[len(found) // 2], found[-1]) for side, found in seen.items()}
        grown = {
            side: (end[1][process] - half[1][process]) / (end[0] - half[0]) for side, (half, end) in halves.items()
        }
        result.add(process, "second_half_bytes_an_image", grown)
    return result
