# SPDX-License-Identifier: Apache-2.0
"""The benchmarks in their short forms, one after the other: results, one table, one plot.

python -m benchmarks.bench [--output .artifacts/bench] [--only NAME ...]

Writes NAME.json and NAME.log of each, table.md and plot.png. What is measured is the same as in the whole form, with
fewer images, rounds and families. LEFT_OUT are not run unless they are named. A benchmark that fails is reported, the
others go on, and the exit code is 1.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import plot, summary
from benchmarks.catalogue import BENCHMARKS
from benchmarks.results import ROOT

OUTPUT = ROOT / ".artifacts" / "bench"
TIMEOUT_S = 600
STOP_S = 60
NUM_LINES = 15  # of the log of a benchmark that failed

NAMES = [name for name, benchmark in BENCHMARKS.items() if benchmark.short is not None]
# A process with an engine takes 17 s to start and end, and that is most of the time: these say less for it.
LEFT_OUT = (
    *("kv_restart", "upstream_connectors", "feature_steps", "feature_costs"),
    *("sealing", "memory", "chaos", "processor"),
)


def arguments() -> argparse.ArgumentParser:
    """The options of all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIRECTORY")
    default = [name for name in NAMES if name not in LEFT_OUT]
    parser.add_argument("--only", nargs="+", default=default, choices=NAMES, metavar="NAME", help=", ".join(NAMES))
    return parser


def main() -> None:
    """Run them, print the table, and say what failed."""
    options = arguments().parse_args()
    start = time.monotonic()
    options.output = options.output.resolve()
    failed = [name for name in options.only if not run(name, options.output)]
    found = {name: json.loads((options.output / f"{name}.json").read_text()) for name in options.only
             if name not in failed}  # fmt: skip
    if table := summary.table(found):
        (options.output / "table.md").write_text(table)
        print(f"\n{table}")
    if points := plot.points_of(found):
        plot.draw(points, options.output / "plot.png")
    print(f"{len(found)} of {len(options.only)} in {time.monotonic() - start:.0f} s; see {options.output}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run(name: str, output: Path) -> bool:
    """Run one in its short form, and print its time, or the end of its log; whether there is a result."""
    output.mkdir(parents=True, exist_ok=True)
    result, log_path = output / f"{name}.json", output / f"{name}.log"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.run", name, "--short", "--output", str(output)]
    start = time.monotonic()
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
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
