# SPDX-License-Identifier: Apache-2.0
"""A process that writes packages into a store for as long as it lives: PLACE SOURCE BUDGET_BYTES SEED [ROUNDS].

SOURCE holds packed packages under their keys. Imports no torch, so that fifty of these start in seconds.
"""

import random
import sys
from pathlib import Path

from vllm_mmcache.components.features.directory import Directory

from vllm_mmcache.components.features import directory as module

module.LOCK_S = 60.0  # others have it for as long as a busy machine takes


def main(place: str, source: str, budget_bytes: str, seed: str, rounds: str = "1000000") -> None:
    packed = {path.name: path.read_bytes() for path in Path(source).iterdir()}
    directory = Directory(place)
    drawn = random.Random(seed)
    print("ready", flush=True)
    for _ in range(int(rounds)):
        key = drawn.choice(sorted(packed))
        with directory.open(key) as file:
            if file is not None:
                seen = bytearray(file.num_bytes)
                file.read_into(0, memoryview(seen))
                if seen != packed[key]:
                    sys.exit("a wrong read")
        half = len(packed[key]) // 2
        parts = packed[key][:half], memoryview(packed[key])[half:]
        directory.write(key, parts, len(packed[key]), int(budget_bytes))


if __name__ == "__main__":
    main(*sys.argv[1:])
