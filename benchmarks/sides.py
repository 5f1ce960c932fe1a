# SPDX-License-Identifier: Apache-2.0
"""Stock and plugin side by side: each side in processes of its own, in turn, on one machine.

A benchmark's worker is a module that is run with `python -m MODULE`, gets its task as JSON on stdin, and
prints its result as the last line. The only difference between the sides is MMCACHE_DISABLE, and the plugin's settings
where some are given: BENCH_MMCACHE_FEATURES=1 is MMCACHE_FEATURES=1 on that side.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

SIDES = ("stock", "mmcache")


def run_worker(module: str, side: str, task: dict[str, Any], more: Mapping[str, str] | None = None) -> Any:
    """Run one task on one side in a fresh process, with more variables where they are given.

    Raises: RuntimeError with the end of the worker's stderr.
    """
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MMCACHE_")}
    environ |= {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", **(more or {})}
    if side == "stock":
        environ["MMCACHE_DISABLE"] = "1"
    else:
        environ |= {k.removeprefix("BENCH_"): v for k, v in environ.items() if k.startswith("BENCH_MMCACHE_")}
    done = subprocess.run(
        [sys.executable, "-m", module], input=json.dumps(task), env=environ, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{module} on {side} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(label: str, seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Medians of both sides and their ratio; prints them in a line."""
    stock, ours = (statistics.median(seconds[side]) for side in SIDES)
    print(f"{label}: stock {stock:.4f} s, mmcache {ours:.4f} s, ratio {ours / stock:.3f}", flush=True)
    return {"stock_s": stock, "mmcache_s": ours, "ratio": ours / stock}
