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


def result_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add where the result goes; see save_result."""
    parser.add_argument("--save", action="store_true", help="write the committed result: results/ beside the benchmark")
    parser.add_argument("--output", type=Path, metavar="DIRECTORY", help="write the result into this directory")
    return parser


def save_result(run_file: str, options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write <benchmark>.json where the options --save and --output of a benchmark's run.py ask for it."""
    benchmark = Path(run_file).parent
    folders = [benchmark / "results"] if options.save else []
    folders += [options.output] if options.output else []
    said = {name: value for name, value in vars(options).items() if name not in ("save", "output")}
    payload = {**provenance(), "options": said, **result}
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{benchmark.name}.json").write_text(json.dumps(payload, indent=2) + "\n")
