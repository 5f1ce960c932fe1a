# SPDX-License-Identifier: Apache-2.0
"""The benchmarks in their short forms, one after the other: results, one table, one plot.

python -m benchmarks.bench [--output .artifacts/bench] [--only NAME ...]

Writes NAME.json and NAME.log of each, table.md and plot.png. What is measured is the same as in the whole form, with
fewer images, rounds and families. A benchmark that fails is reported, the others go on, and the exit code is 1.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks import plot, summary
from benchmarks.catalogue import BENCHMARKS
from benchmarks.results import ROOT

OUTPUT = ROOT / ".artifacts" / "bench"
TIMEOUT_S = 600
STOP_S = 60
NUM_LINES = 15  # of the log of a benchmark that failed


class Failed(Exception):
    """A benchmark has no result; the message says why."""


def main() -> None:
    """Run them, print the table, and say what failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="DIRECTORY")
    names = [name for name, benchmark in BENCHMARKS.items() if benchmark.in_bench]
    parser.add_argument("--only", nargs="+", default=names, metavar="NAME", help=", ".join(BENCHMARKS))
    options = parser.parse_args()
    output, start, found, failed = options.output.resolve(), time.monotonic(), {}, []
    for name in options.only:
        began = time.monotonic()
        try:
            found[name] = run(name, output)
            print(f"{name:18} {time.monotonic() - began:5.0f} s", flush=True)
        except (Failed, TimeoutError) as error:
            failed.append(name)
            print(f"{name:18} {time.monotonic() - began:5.0f} s  FAILED {error}", flush=True)
    if table := summary.table(found):
        (output / "table.md").write_text(table)
        print(f"\n{table}")
    if points := plot.points_of(found):
        plot.draw(points, output / "plot.png")
    print(f"{len(found)} of {len(options.only)} in {time.monotonic() - start:.0f} s; see {output}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run(
    name: str, output: Path, environ: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> summary.Loaded:
    """The result of one in its short form. Raises: Failed with the end of its log; TimeoutError."""
    output.mkdir(parents=True, exist_ok=True)
    result, log_path = output / f"{name}.json", output / f"{name}.log"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.run", name, "--short", "--output", str(output)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, **(environ or {})}
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            stop(process)
            raise TimeoutError(f"{name} took longer than {timeout_s:.0f} s") from None
    if status or not result.exists():
        lines = log_path.read_text(errors="replace").splitlines()[-NUM_LINES:]
        raise Failed("\n    ".join([f"with status {status}:", *lines]))
    found: summary.Loaded = json.loads(result.read_text())
    return found


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt it, so that it ends its servers."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
