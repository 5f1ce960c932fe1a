# SPDX-License-Identifier: Apache-2.0
"""What every committed result says about itself: commit, machine, versions, command; and where it lies."""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


def processor() -> str:
    """The processor's name, and its cores."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    return f"{name}, {os.cpu_count()} cores"


def commit() -> str:
    """The checkout's commit, with + where the tree is dirty."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def provenance() -> dict[str, Any]:
    """Commit, processor, cores, Python and vLLM versions, and the command."""
    from vllm.version import __version__

    module = sys.modules["__main__"].__spec__
    return {
        "commit": commit(),
        "machine": processor(),
        "python": platform.python_version(),
        "vllm": __version__,
        "command": " ".join(["python", "-m", module.name if module else "?", *sys.argv[1:]]),
    }


def save_result(run_file: str, options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write results/<benchmark>.json beside a benchmark's run.py, if its --save asks for it."""
    if not options.save:
        return
    path = result_path(Path(run_file).parent.name)
    path.parent.mkdir(exist_ok=True)
    payload = {**provenance(), "options": vars(options), **result}
    path.write_text(json.dumps(payload, indent=2) + "\n")


def result_path(benchmark: str) -> Path:
    """Where a benchmark's result is: beside its run.py, or in the folder BENCH_RESULTS."""
    folder = os.environ.get("BENCH_RESULTS") or Path(__file__).parent / benchmark / "results"
    return Path(folder) / f"{benchmark}.json"
