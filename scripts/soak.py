# SPDX-License-Identifier: Apache-2.0
"""What is slower than CI: the random tests larger and on all families, minutes of load, memory over many images, chaos.

python -m scripts.soak [--parts NAME ...] [--save]

The tests are those of CI, so many times as large (TEST_SCALE). --save keeps what each part found in
benchmarks/results/soak.json, with its commit and command, beside what is there of other parts.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

from benchmarks.results import FOLDER, ROOT, provenance
from scripts.matrix import counted

OUTPUT = ROOT / ".artifacts" / "soak"
RESULT = FOLDER / "soak.json"
NUM_LINES = 25  # of the output of a part that failed


TESTS = {  # how many times CI's size, and which
    "properties": (15, "tests/unit/components/block_keys/test_sharing.py"
                       " tests/unit/components/features/engine/test_store.py"
                       " tests/unit/components/features/test_package.py"
                       " tests/unit/components/identity/test_identifiers.py"
                       " tests/unit/components/image_extraction/test_extract.py"
                       " tests/unit/components/image_spans/test_attention_spans.py"
                       " tests/unit/components/image_spans/test_spans.py"
                       " tests/unit/components/image_checkpoints/test_positions.py"),
    "fuzz": (80, "tests/system/fuzz/test_random.py"),
    "planted": (95, "tests/system/planted/test_decoders.py"),
    "random-load": (10, "tests/engine/exactness/test_random.py"),
    "random-load-checkpoints": (3, "tests/engine/image_checkpoints/test_checkpoints.py -k mixed_requests"),
    "preemption-gemma3": (10, "tests/engine/image_spans/test_atomic.py"),
    "records": (3, "tests/engine/observe/test_random.py"),
}  # fmt: skip
PARTS = (*TESTS, "load", "memory", "chaos")  # the last are benchmarks, each of which counts as one test


def main() -> None:
    """Run the parts one after the other; exit code 1 where one of them failed."""
    parser = argparse.ArgumentParser("python -m scripts.soak", description=__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, metavar="NAME", help=", ".join(PARTS))
    parser.add_argument("--save", action="store_true", help="keep what was found in benchmarks/results/soak.json")
    options = parser.parse_args()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.parts:
        found = run(name)
        print(name, *(f"{found[what]} {what}" for what in ("passed", "failed", "skipped", "seconds")), flush=True)
        failed += [name] if found["failed"] else []
        if options.save:
            keep(name, found)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def keep(name: str, found: dict[str, Any]) -> None:
    """Put what a part found into the committed result."""
    parts = {**(json.loads(RESULT.read_text()) if RESULT.exists() else {}), name: found}
    RESULT.write_text(json.dumps({one: parts[one] for one in PARTS if one in parts}, indent=2) + "\n")


def run(name: str) -> dict[str, Any]:
    """What a part found."""
    times, tests = TESTS.get(name, (0, ""))
    report = OUTPUT / (f"{name}.xml" if tests else f"{name}.json")
    report.unlink(missing_ok=True)
    command = f"pytest -q --timeout=3600 {tests}" if tests else f"benchmarks.run {name}"
    into = f"--junitxml={report}" if tests else f"--output={OUTPUT}"
    scale = {"TEST_SCALE": str(times)} if tests else {}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", *command.split(), into], env=os.environ | scale, cwd=ROOT, capture_output=True, text=True
    )
    found: dict[str, Any] = {"passed": int(not done.returncode), "failed": int(done.returncode != 0), "skipped": 0}
    if report.exists() and tests:
        found["passed"], found["skipped"], failed = counted(report)
        found["failed"] = max(len(failed), found["failed"])  # a run that dies has a report that says nothing of it
    elif report.exists():
        found["found"] = json.loads(report.read_text())["found"]
    if found["failed"]:
        lines = (done.stdout + done.stderr).splitlines()[-NUM_LINES:]
        print(f"{name} failed with status {done.returncode}:", *lines, sep="\n    ", flush=True)
    said = " ".join([*(f"{variable}={value}" for variable, value in scale.items()), "python -m", command])
    return {**provenance(), "command": said, "seconds": round(time.monotonic() - start, 1), **found}


if __name__ == "__main__":
    main()
