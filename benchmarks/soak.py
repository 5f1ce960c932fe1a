# SPDX-License-Identifier: Apache-2.0
"""What is slower than CI: the random tests larger and on all families, minutes of load, memory over many images, chaos.

python -m benchmarks.soak [--parts NAME ...] [--save]

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
    """One command. With a `scale` it is pytest, and its tests are so many times as large as in CI."""

    arguments: tuple[str, ...]
    scale: int = 0
    result: str = ""  # the file that it writes into OUTPUT


PARTS: dict[str, Part] = {
    "properties": Part(
        (
            *("tests/block_keys/test_sharing.py", "tests/lifted_bodies/test_lift.py", "tests/features/test_package.py"),
            *(
                "tests/features/test_store.py",
                "tests/identity/test_layout.py",
                "tests/image_spans/attention/test_spans.py",
            ),
            *("tests/image_spans/test_spans.py", "tests/image_checkpoints/test_positions.py"),
        ),
        scale=15,
    ),
    "fuzz": Part(("tests/fuzz/test_random.py",), scale=80),
    "random-load": Part(("tests/exactness/test_random.py",), scale=10),
    "random-load-checkpoints": Part(("tests/image_checkpoints/test_checkpoints.py", "-k", "mixed_requests"), scale=3),
    "preemption-gemma3": Part(("tests/image_spans/test_atomic.py",), scale=10),
    "records": Part(("tests/observe/test_random.py",), scale=3),
    "load": Part(("benchmarks.run", "load"), result="load.json"),
    "memory": Part(("benchmarks.run", "memory"), result="memory.json"),
    "chaos": Part(("benchmarks.run", "chaos"), result="chaos.json"),
}


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--save", action="store_true", help="keep what was found in results/soak.json")
    return parser


def main() -> None:
    """Run the parts one after the other; exit code 1 where one of them failed."""
    options = arguments().parse_args()
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
    """What a part found. A command that is no pytest counts as one test."""
    report, result = OUTPUT / f"{name}.xml", OUTPUT / part.result
    for old in (report, result) if part.result else (report,):
        (ROOT / old).unlink(missing_ok=True)
    env = dict(os.environ)
    if part.scale:
        env["TEST_SCALE"] = str(part.scale)
        command = ["pytest", "-q", f"--timeout={TEST_TIMEOUT_S}", *part.arguments]
        more = [f"--junitxml={report}"]
    else:
        command, more = list(part.arguments), ["--output", str(OUTPUT)]
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *command, *more], env=env, cwd=ROOT, capture_output=True, text=True, check=False
    )
    found: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1)}
    if part.scale:
        found |= counts_of(ROOT / report)
        # A run that dies has no report, or one that says nothing of it.
        found["failed"] = max(found["failed"], int(done.returncode != 0))
    else:
        found |= {"passed": int(done.returncode == 0), "failed": int(done.returncode != 0), "skipped": 0}
        if (ROOT / result).exists():
            found["found"] = json.loads((ROOT / result).read_text())["found"]
    if found["failed"]:
        lines = (done.stdout + done.stderr).splitlines()[-NUM_LINES:]
        print(f"{name} failed with status {done.returncode}:", *lines, sep="\n    ", flush=True)
    scale = f"TEST_SCALE={part.scale} " if part.scale else ""
    said = {one: value for one, value in provenance().items() if one != "command"}
    return {**said, "command": f"{scale}python -m {' '.join(command)}", **found}


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
