# SPDX-License-Identifier: Apache-2.0
"""What is slower than CI: the random tests larger and on all families, minutes of load, memory over many images, chaos.

python -m scripts.soak [--parts NAME ...] [--save]

The tests are those of CI, so many times as large (TEST_SCALE). --save keeps what each part found in results/soak.json,
with its commit and command, beside what is there of other parts.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import provenance
from benchmarks.results import FOLDER, ROOT

OUTPUT = Path(".artifacts") / "soak"  # below ROOT
RESULT = FOLDER / "soak.json"
NUM_LINES = 25  # of the output of a part that failed
TEST_TIMEOUT_S = 3600


@dataclass(frozen=True)
class Part:
    """Tests, so many times as large as in CI; or without a `scale` a benchmark, its name and options."""

    arguments: tuple[str, ...]
    scale: int = 0


PARTS: dict[str, Part] = {
    "properties": Part((
        "tests/block_keys/test_sharing.py", "tests/lifted_bodies/test_lift.py", "tests/features/test_package.py",
        "tests/features/test_store.py", "tests/identity/test_layout.py", "tests/image_spans/attention/test_spans.py",
        "tests/image_spans/test_spans.py", "tests/image_checkpoints/test_positions.py",
    ), scale=15),
    "fuzz": Part(("tests/fuzz/test_random.py",), scale=80),
    "random-load": Part(("tests/exactness/test_random.py",), scale=10),
    "random-load-checkpoints": Part(("tests/image_checkpoints/test_checkpoints.py", "-k", "mixed_requests"), scale=3),
    "preemption-gemma3": Part(("tests/image_spans/test_atomic.py",), scale=10),
    "records": Part(("tests/observe/test_random.py",), scale=3),
    "load": Part(("load",)),
    "memory": Part(("memory",)),
    "chaos": Part(("chaos",)),
}  # fmt: skip


def main() -> None:
    """Run the parts one after the other; exit code 1 where one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m scripts.soak", description=__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--save", action="store_true", help="keep what was found in results/soak.json")
    options = parser.parse_args()
    (ROOT / OUTPUT).mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.parts:
        found = run(name, PARTS[name])
        counts = ", ".join(f"{found[count]} {count}" for count in ("passed", "failed", "skipped"))
        print(f"{name:24} {counts}, {found['seconds']:.0f} s", flush=True)
        failed += [name] if found["failed"] else []
        if options.save:
            keep(name, found)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run(name: str, part: Part) -> dict[str, Any]:
    """What a part found. A benchmark counts as one test."""
    report = OUTPUT / (f"{name}.xml" if part.scale else f"{name}.json")
    (ROOT / report).unlink(missing_ok=True)
    if part.scale:
        command, more = ["pytest", "-q", f"--timeout={TEST_TIMEOUT_S}", *part.arguments], [f"--junitxml={report}"]
    else:
        command, more = ["benchmarks.run", *part.arguments], ["--output", str(OUTPUT)]
    scale = {"TEST_SCALE": str(part.scale)} if part.scale else {}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *command, *more], env={**os.environ, **scale}, cwd=ROOT,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1)}
    if part.scale:
        found |= counts_of(ROOT / report)
        # A run that dies has no report, or one that says nothing of it.
        found["failed"] = max(found["failed"], int(done.returncode != 0))
    else:
        found |= {"passed": int(done.returncode == 0), "failed": int(done.returncode != 0), "skipped": 0}
        if (ROOT / report).exists():
            found["found"] = json.loads((ROOT / report).read_text())["found"]
    if found["failed"]:
        lines = (done.stdout + done.stderr).splitlines()[-NUM_LINES:]
        print(f"{name} failed with status {done.returncode}:", *lines, sep="\n    ", flush=True)
    said = {one: value for one, value in provenance().items() if one != "command"}
    variables = "".join(f"{key}={value} " for key, value in scale.items())
    return {**said, "command": f"{variables}python -m {' '.join(command)}", **found}


def counts_of(report: Path) -> dict[str, int]:
    """Tests of a report in JUnit's form, by outcome."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            counts["failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"] += 1
    return counts


def keep(name: str, found: dict[str, Any]) -> None:
    """Put what a part found into the committed result."""
    parts = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    parts[name] = found
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({one: parts[one] for one in PARTS if one in parts}, indent=2) + "\n")


if __name__ == "__main__":
    main()
