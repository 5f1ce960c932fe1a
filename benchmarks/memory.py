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
from benchmarks.servers import SMALL_ARGS, SMALL_CACHES, memory, zoo_server
from benchmarks.sides import SIDES
from vllm_mmcache.zoo import build_cached

PICTURE = Kind("image/png", (320, 320), 2, {"format": "PNG"})
STEPS = 10


def measure(options: Namespace) -> Result:
    """MiB of both sides, a case for each number of images that were seen."""
    result, seen = Result(), {}
    with tempfile.TemporaryDirectory() as folder:
        model = build_cached(options.family, Path(folder))
        for side in SIDES:
            with zoo_server(model, side, images=options.images, args=SMALL_ARGS, env=SMALL_CACHES) as server:
                seen[side] = dict(memory(server, PICTURE, options.images, options.distinct, STEPS))
    for images in seen["stock"]:
        for process in seen["stock"][images]:
            sizes = {side: round(found[images][process] / MIB, 1) for side, found in seen.items()}
            result.add(f"{images} images", f"{process}_mib", sizes)
    return result
