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


def provenance() -> dict[str, Any]:
    """Commit (with + where the tree is dirty), processor, cores, Python and vLLM versions, and the command."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()

    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = names[0] if names else processor
    from vllm.version import __version__

    dirty = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    module = sys.modules["__main__"].__spec__
    return {
        "commit": git("rev-parse", "--short", "HEAD") + dirty,
        "machine": f"{processor}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "vllm": __version__,
        "command": " ".join(["python", "-m", module.name if module else "?", *sys.argv[1:]]),
    }


def save_result(run_file: str, options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write results/<benchmark>.json beside a benchmark's run.py, if its --save asks for it."""
    if not options.save:
        return
    folder = Path(run_file).parent / "results"
    folder.mkdir(exist_ok=True)
    payload = {**provenance(), "options": vars(options), **result}
    (folder / f"{folder.parent.name}.json").write_text(json.dumps(payload, indent=2) + "\n")
