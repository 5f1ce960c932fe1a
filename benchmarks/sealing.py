# SPDX-License-Identifier: Apache-2.0
"""What encryption at rest costs: a package from a directory and into it, and 1000 records, sealed and clear.

Processor time of the thread that works, so that others on the machine count little; files are in the page cache, sides
take turns, and each number is a median.
"""

import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.results import Result
from tests.features.packages import identity
from vllm_mmcache.features.disk import DiskTier
from vllm_mmcache.features.lasting import name_of
from vllm_mmcache.features.package import Shape
from vllm_mmcache.records.framing import frame, unframe
from vllm_mmcache.sealing import CLEAR, Clear, Sealed

KEYS = {"clear": CLEAR, "sealed": Sealed(b"k" * 32)}
WIDTH = 16384
RECORD, NAME = bytes(400), b"n" * 32


def measure(options: Namespace) -> Result:
    """CPU seconds by what is done."""
    result = Result()
    shape = Shape(options.mebibytes * 1024**2 // (2 * WIDTH), WIDTH, "bfloat16")
    features, room = (memoryview(bytearray(shape.num_bytes)) for _ in range(2))
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
    for what, sides in seconds.items():
        result.add(what, "cpu_s", {side: median(taken) for side, taken in sides.items()})
    return result


def records(key: Clear) -> None:
    """A thousand records, written and read, without the file."""
    for _ in range(1000):
        assert unframe(NAME, key.unseal(NAME, key.seal(NAME, frame(NAME, RECORD)))) == RECORD
