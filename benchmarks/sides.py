# SPDX-License-Identifier: Apache-2.0
"""Stock and plugin side by side: each side in processes of its own, in turn, on one machine.

The only difference between the sides is MMCACHE_DISABLE, and the plugin's settings where some are given:
BENCH_MMCACHE_FEATURES=1 is MMCACHE_FEATURES=1 on that side.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

SIDES = ("stock", "mmcache")


def run_worker(call: str, side: str, environ: Mapping[str, str] | None = None, **arguments: Any) -> Any:
    """What a function `benchmarks.module:name` gives on one side, in a fresh process; see worker.py.

    `environ`: further variables. Every side but the plugin's is stock. Raises: RuntimeError with the end of stderr.
    """
    variables = {k: v for k, v in os.environ.items() if not k.startswith("MMCACHE_")}
    variables |= {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", **(environ or {})}
    if side == "mmcache":
        variables |= {k.removeprefix("BENCH_"): v for k, v in variables.items() if k.startswith("BENCH_MMCACHE_")}
    else:
        variables["MMCACHE_DISABLE"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.worker"], input=json.dumps({"call": call, **arguments}),
        env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{call} on {side} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def in_turn(repeats: int, sides: Iterable[str] = SIDES) -> list[str]:
    """Each side so often, in turn, the one that goes first changing: two processes of one side differ by 5 to 15 %."""
    order = list(sides)
    return [side for number in range(repeats) for side in (order[::-1] if number % 2 else order)]
