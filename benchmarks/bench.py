# SPDX-License-Identifier: Apache-2.0
"""The benchmarks in a short form, stock and plugin, one after the other: results, one table, one plot.

python -m benchmarks.bench [--output .artifacts/bench] [--only NAME ...]

Writes NAME.json and NAME.log of each, table.md and plot.png. The short forms have fewer images, rounds and families,
by the benchmarks' own options; what they measure is the same. Cold requests are left out: they cost about the same on
both sides, and a short form has too few of them to tell. A benchmark that fails is reported, the others go on, and the
exit code is 1.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import plot, summary

OUTPUT = summary.ROOT / ".artifacts" / "bench"
TIMEOUT_S = 600
STOP_S = 60
NUM_LINES = 15  # of the log of a benchmark that failed

# By name of the benchmark. A process with an engine takes 17 s to start and end, and that is most of the time.
SHORT: dict[str, tuple[str, ...]] = {
    "block_keys": ("--rounds", "9"),
    "gemma3_attention": ("--windows", "128", "--steps", "100", "--rounds", "5", "--repeats", "1"),
    "image_questions": ("--families", "gemma3", "--kinds", "workloads"),
    "agents": ("--families", "qwen3.5"),
    "warm_turn": ("--images", "10", "--turns", "5", "--turns-at-once", "2", "--cold", "2", "--distinct", "80"),
    "gallery": ("--families", "qwen3-vl", "--images", "10", "--repeats", "1"),
    "restart": ("--families", "qwen3-vl", "--tiers", "disk", "--images", "10", "--repeats", "1"),
    "identity": ("--rounds", "500", "--turns", "20", "--swaps", "1"),
    "observe": ("--turns", "10", "--pairs", "60"),
    "load": ("--seconds", "15"),
    "start_cost": ("--pairs", "1"),
}


def arguments() -> argparse.ArgumentParser:
    """The options of all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIRECTORY")
    parser.add_argument("--only", nargs="+", default=list(SHORT), choices=SHORT, metavar="NAME", help=", ".join(SHORT))
    return parser


def main() -> None:
    """Run them, print the table, and say what failed."""
    options = arguments().parse_args()
    start = time.monotonic()
    options.output = options.output.resolve()
    failed = [name for name in options.only if not run(name, options.output)]
    results = {name: json.loads((options.output / f"{name}.json").read_text()) for name in options.only
               if name not in failed}  # fmt: skip
    if results:
        table = summary.table(results)
        (options.output / "table.md").write_text(table)
        print(f"\n{table}")
    if any(plot.points_of(results)):
        plot.draw(results, options.output / "plot.png")
    print(f"{len(results)} of {len(options.only)} in {time.monotonic() - start:.0f} s; see {options.output}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run(name: str, output: Path) -> bool:
    """Run one in its short form, and print its time, or the end of its log; whether there is a result."""
    output.mkdir(parents=True, exist_ok=True)
    result, log_path = output / f"{name}.json", output / f"{name}.log"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"benchmarks.{name}.run", *SHORT[name], "--output", str(output)]
    start = time.monotonic()
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=summary.ROOT)
        status = wait(process)
    seconds = time.monotonic() - start
    if status == 0 and result.exists():
        print(f"{name:18} {seconds:5.0f} s", flush=True)
        return True
    lines = log_path.read_text(errors="replace").splitlines()[-NUM_LINES:]
    print(f"{name:18} {seconds:5.0f} s  FAILED with status {status}:", *lines, sep="\n    ", flush=True)
    return False


def wait(process: subprocess.Popen[bytes]) -> int:
    """Its exit status; one that takes too long is interrupted, so that it ends its servers."""
    for timeout_s, end in ((TIMEOUT_S, lambda: process.send_signal(signal.SIGINT)), (STOP_S, process.kill)):
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            end()
    return process.wait()


if __name__ == "__main__":
    main()
