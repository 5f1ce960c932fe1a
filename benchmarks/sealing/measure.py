# SPDX-License-Identifier: Apache-2.0
"""What encryption at rest costs: a package from a directory and into it, and a record, with a key and without.

python -m benchmarks.sealing.measure [--mebibytes 64] [--rounds 15] [--save]

Processor time of the thread that works, so that others on the machine count little; files are in the page cache, sides
take turns, and each number is a median.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import result_options, save_result
from tests.features.packages import identity
from vllm_mmcache.features.disk import DiskTier
from vllm_mmcache.features.lasting import name_of
from vllm_mmcache.features.package import Shape
from vllm_mmcache.records.framing import frame, unframe
from vllm_mmcache.sealing import CLEAR, Clear, Sealed

KEYS = {"clear": CLEAR, "sealed": Sealed(b"k" * 32)}
WIDTH = 16384
RECORD = bytes(400)
NAME = b"n" * 32


def main() -> None:
    """Measure, print, and write the result with --save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sealing.measure", description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=64, help="size of the package")
    parser.add_argument("--rounds", type=int, default=15)
    options = result_options(parser).parse_args()
    shape = Shape(options.mebibytes * 1024**2 // (2 * WIDTH), WIDTH, "bfloat16")
    features = memoryview(bytearray(shape.num_bytes))
    room = memoryview(bytearray(shape.num_bytes))
    seconds: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:  # /tmp may be RAM
        tiers = {side: DiskTier(Path(folder) / side, 4 << 30, key=key) for side, key in KEYS.items()}
        for _ in range(options.rounds):
            for side, tier in tiers.items():
                work: dict[str, Callable[[], object]] = {
                    "save": lambda tier=tier: tier.save(identity(), shape, features),  # type: ignore[misc]
                    "load": lambda tier=tier: tier.load(identity(), shape, lambda: room, time.monotonic() + 60),  # type: ignore[misc]
                    "1000 records": lambda side=side: records(KEYS[side]),  # type: ignore[misc]
                }
                tier.directory.path_of(name_of(identity(), KEYS[side])).unlink(missing_ok=True)
                for what, action in work.items():
                    start = time.thread_time()
                    assert action() is not False
                    seconds.setdefault(what, {}).setdefault(side, []).append(time.thread_time() - start)
    result: dict[str, Any] = {
        what: {f"{side}_ms": round(1000 * statistics.median(taken), 2) for side, taken in sides.items()}
        for what, sides in seconds.items()
    }
    for what, sides in result.items():
        print(what, sides)
    save_result(__file__, options, {"processor_time": result})


def records(key: Clear) -> None:
    """A thousand records, written and read, without the file."""
    for _ in range(1000):
        assert unframe(NAME, key.unseal(NAME, key.seal(NAME, frame(NAME, RECORD)))) == RECORD


if __name__ == "__main__":
    main()
