# SPDX-License-Identifier: Apache-2.0
"""Memory over thousands of distinct images: what each process of a server has grown by, step by step.

The caches that may fill for hours are made as small as in the load test, so that they are full after a few hundred.
"""

from argparse import Namespace
from collections.abc import Iterator

from benchmarks.pictures import Kind
from benchmarks.processes import MIB
from benchmarks.results import Result
from benchmarks.servers import SMALL_ARGS, SMALL_CACHES, counters, memory, on_each_side
from vllm_mmcache.demo.server import Server

STEPS = 10


def measure(options: Namespace) -> Result:
    """MiB of both sides by the number of images that were seen; then what an image took in the second half."""
    result = Result()
    kind = Kind("image/png", (options.size, options.size), 2, {"format": "PNG"})

    def one_side(server: Server, side: str) -> Iterator[tuple[tuple[str, str], float]]:
        seen = memory(server, kind, options.images, options.distinct, STEPS)
        result.details[side] = counters(server.url)
        for images, sizes in seen:
            for process, size in sizes.items():
                yield (f"{images} images", f"{process}_mib"), round(size / MIB, 1)
        (_, start), (half, half_sizes), (images, end) = seen[0], seen[len(seen) // 2], seen[-1]
        for process in start:
            yield (process, "start_mib"), round(start[process] / MIB, 1)
            yield (process, "end_mib"), round(end[process] / MIB, 1)
            yield (process, "second_half_bytes_an_image"), (end[process] - half_sizes[process]) / (images - half)

    server = {"images": options.images, "args": SMALL_ARGS, "env": SMALL_CACHES}
    on_each_side(result, one_side, options.sides, options.family, **server)
    return result
