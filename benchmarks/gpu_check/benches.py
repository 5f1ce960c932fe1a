# SPDX-License-Identifier: Apache-2.0
"""The benchmarks that touch the engine, in a short form, with every room on; their table is that of docs/benchmarks.md.

A benchmark is run by its own command in a process of its own. What is not run has its reason in LEFT_OUT.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_mmcache.prove.items import OutOfTime, last_error
from vllm_mmcache.upstream.proven import ENGINE_ROOMS

# Options that make a benchmark short; its cases stay the same.
SHORT: dict[str, tuple[str, ...]] = {
    "block_keys": ("--rounds", "5"),
    "gallery": ("--images", "6", "--repeats", "1"),
    "image_questions": ("--unique", "20"),
    "cold_requests": ("--families", "gemma3", "qwen3.5", "--rounds", "3", "--repeats", "1", "--pairs", "4"),
    "agents": (),
    "computer_use": ("--steps", "12"),
    "image_service": ("--requests", "20"),
}

_API = "measures the API server, which has no CUDA part"
_CPU = "its server is one of the CPU"
_STORE = "measures disk, Valkey and threads; what depends on the platform is in gallery"
LEFT_OUT: dict[str, str] = {
    "warm_turn": _API,
    "processor": _API,
    "identity": _API,
    "observe": _API,
    "load": _CPU,
    "memory": _CPU,
    "random_mm": _CPU,
    "kv_restart": _CPU,
    "chaos": _CPU,
    "upstream_connectors": "supplies what vLLM's CPU build lacks",
    "feature_steps": _STORE,
    "feature_costs": _STORE,
    "sealing": _STORE,
    "gemma3_attention": "measures the plugin's attention for vLLM's CPU backend; other platforms keep vLLM's own",
    "start_cost": "measures what the plugin does before the model runs",
    "restart": _STORE,
}
TIMEOUT_S = 1800


def run(name: str, left_s: float) -> dict[str, Any]:
    """Run a benchmark: its state and reason, and its result where there is one. Raises: OutOfTime after `left_s`."""
    if left_s <= 0:
        raise OutOfTime
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | {f"BENCH_MMCACHE_{room.upper()}": "1" for room in ENGINE_ROOMS}
        environ |= {"VLLM_PLUGINS": "mmcache"}
        command = [sys.executable, "-m", "benchmarks.run", name, *SHORT[name], "--output", folder]
        try:
            timeout = min(left_s, TIMEOUT_S)
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=timeout)
        except subprocess.TimeoutExpired:
            if left_s < TIMEOUT_S:
                raise OutOfTime from None
            return {"state": "failed", "reason": f"took longer than {TIMEOUT_S} s"}
        path = Path(folder) / f"{name}.json"
        if done.returncode or not path.is_file():
            return {"state": "failed", "reason": last_error(done.stderr, done.returncode)}
        return {"state": "passed", "reason": "ran to its end", "result": json.loads(path.read_text())}


def table(results: dict[str, dict[str, Any]]) -> list[str]:
    """The rows of docs/benchmarks.md, made from these results."""
    from benchmarks import summary

    return summary.table({name: found["result"] for name, found in results.items() if "result" in found}).splitlines()
