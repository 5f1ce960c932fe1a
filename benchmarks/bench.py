# SPDX-License-Identifier: Apache-2.0
"""The benchmarks in their short forms, one after the other: results, one table, one plot.

python -m benchmarks.bench [--output .artifacts/bench] [--only NAME ...]

Writes NAME.json and NAME.log of each, table.md and plot.png. What is measured is the same as in the whole form, with
fewer images, rounds and families. A benchmark that fails is reported, the others go on, and the exit code is 1.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks import summary
from benchmarks.catalogue import BENCHMARKS
from benchmarks.results import ROOT
from benchmarks.rows import Loaded

TIMEOUT_S = 600


class Failed(Exception):
    """A benchmark has no result; the message says why."""


def main() -> None:
    """Run them, print the table, and say what failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / ".artifacts" / "bench", metavar="DIRECTORY")
    names = [name for name, benchmark in BENCHMARKS.items() if benchmark.in_bench]
    parser.add_argument("--only", nargs="+", default=names, metavar="NAME", help=", ".join(BENCHMARKS))
    options = parser.parse_args()
    output, start, found, failed = options.output.resolve(), time.monotonic(), {}, []
    for name in options.only:
        began, said = time.monotonic(), ""
        try:
            found[name] = run(name, output)
        except (Failed, TimeoutError) as error:
            failed.append(name)
            said = f"  FAILED {error}"
        print(f"{name:18} {time.monotonic() - began:5.0f} s{said}", flush=True)
    if table := summary.table(found):
        (output / "table.md").write_text(table)
        print(f"\n{table}")
    if points := summary.points_of(found):
        summary.draw(points, output / "plot.png")
    print(f"{len(found)} of {len(options.only)} in {time.monotonic() - start:.0f} s; see {output}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run(name: str, output: Path, environ: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> Loaded:
    """The result of one in its short form. Raises: Failed with the end of its log; TimeoutError."""
    output.mkdir(parents=True, exist_ok=True)
    result, log_path = output / f"{name}.json", output / f"{name}.log"
    result.unlink(missing_ok=True)
    interrupt = ["timeout", "--foreground", "--signal=INT", "--kill-after=60", str(timeout_s)]  # it ends its servers
    command = [*interrupt, sys.executable, "-m", "benchmarks.run", name, "--short", "--output", str(output)]
    with log_path.open("wb") as log:
        environment = {**os.environ, **(environ or {})}
        status = subprocess.run(command, stdout=log, stderr=log, cwd=ROOT, env=environment, check=False).returncode
    if status in (124, 137):  # as timeout says that it ended it
        raise TimeoutError(f"{name} took longer than {timeout_s:.0f} s")
    if status or not result.exists():
        lines = log_path.read_text(errors="replace").splitlines()[-15:]
        raise Failed("\n    ".join([f"with status {status}:", *lines]))
    found: Loaded = json.loads(result.read_text())
    return found


if __name__ == "__main__":
    main()
