# SPDX-License-Identifier: Apache-2.0
"""What encryption at rest costs: a package from a directory and into it, and 1000 records, sealed and clear.

Processor time of the thread that works, so that others on the machine count little; files are in the page cache, sides
take turns, and each number is a median.
"""

import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.results import Action, Result, medians
from tests.support.packages import file_tier, identity
from vllm_mmcache.components.features import tiers
from vllm_mmcache.components.features.package import Shape
from vllm_mmcache.storage.encryption import PLAIN, AesGcmCodec
from vllm_mmcache.storage.frame import frame, unframe

KEYS = {"clear": PLAIN, "sealed": AesGcmCodec(b"k" * 32)}
WIDTH = 16384
RECORD, NAME = bytes(400), b"n" * 32


def measure(options: Namespace) -> Result:
    """CPU seconds by what is done."""
    result = Result()
    shape = Shape(options.mebibytes * 1024**2 // (2 * WIDTH), WIDTH, "bfloat16")
    features, room = (memoryview(bytearray(shape.num_bytes)) for _ in range(2))
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:  # /tmp may be RAM
        of_side = {side: file_tier(Path(folder) / side, 4 << 30, codec=key) for side, key in KEYS.items()}

        def save(side: str) -> Action:
            of_side[side].backend.clear()
            return lambda: done(tiers.save(of_side[side], identity(), shape, features))

        def load(side: str) -> Action:
            return lambda: done(tiers.load(of_side[side], identity(), shape, lambda: room, time.monotonic() + 60))

        kinds: dict[str, Callable[[str], Action]]
        kinds = {"save": save, "load": load, "1000 records": lambda side: partial(records, side)}
        work = {(what, side): partial(kind, side) for side in KEYS for what, kind in kinds.items()}
        found = medians(work, options.rounds, clock=time.thread_time)
    for what in kinds:
        result.add(what, "cpu_s", {side: found[what, side] for side in KEYS})
    return result


def done(outcome: object) -> None:
    assert outcome is not False


def records(side: str) -> None:
    """A thousand records, written and read, without the file."""
    for _ in range(1000):
        sealed = KEYS[side].encrypt_bytes(NAME, frame(NAME, RECORD))
        assert unframe(NAME, KEYS[side].decrypt_bytes(NAME, sealed)) == RECORD
