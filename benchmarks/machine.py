# SPDX-License-Identifier: Apache-2.0
"""What every result says of where it comes from: commit, machine, versions, command."""

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


def commit(checkout: Path | None = None) -> str:
    """A checkout's commit, with + where the tree is dirty; BENCH_COMMIT where the files are no checkout.

    `checkout` is that of the working directory if it is not given.
    """
    if "BENCH_COMMIT" in os.environ:
        return os.environ["BENCH_COMMIT"]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False, cwd=checkout
        ).stdout.strip()

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
