# SPDX-License-Identifier: Apache-2.0
"""The main function of a worker whose tasks each need an engine pool of their own: checks and benchmarks."""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_mmcache.prove.engines import EnginePool


def run_task(kinds: Mapping[str, Callable[..., Any]]) -> None:
    """Read a task from stdin, call what its kind names with the pool and the rest; the result is the last line."""
    task = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as root:
        pool = EnginePool(Path(root))
        result = kinds[task.pop("kind")](pool, **task)
        print(json.dumps(result), flush=True)
        pool.close()
