# SPDX-License-Identifier: Apache-2.0
"""`make seeded-faults`: plants faults in a copy of the tree, one at a time, and says which tests notice.

    python -m scripts.seeded_faults [--only ID ...] [--save] [--tests ...]

The faults are in seeded_faults.toml. First the tests run without a fault, and must pass. Then each fault is planted,
its tests run, and it is taken out again. A fault is `killed` where one of its tests fails, `survived` where all pass,
and `broken` where its file can't be imported any more, which any test would notice. Exit code 1 where one is not
killed. --save writes docs/seeded_faults.md, of all faults. --tests takes other arguments of pytest for every fault.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

REPO = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".toml")
PAGE = REPO / "docs" / "seeded_faults.md"

TIMEOUT_S = 600
"""Of the tests of one fault. A fault that hangs them is killed by that."""
PYTEST = ("-m", "pytest", "-q", "-x", "--reruns", "0", "-p", "no:cacheprovider")

State = Literal["killed", "survived", "broken"]

INTRODUCTION = """# Seeded faults

<!-- written by scripts/seeded_faults.py from scripts/seeded_faults.toml; don't edit -->

For contributors and reviewers: how far one can trust the tests. Each row is a mistake that could be made in the
package, such as a field that is missing in a key, or a bound that is off by one. The tests must notice it when it is
planted.

The faults were chosen by reading the package, before anybody looked whether a test sees them. Then all tests of the
[fast lane](../tests/README.md#which-tests-are-fast) were run with each fault, and the slower ones that are about its
component. Of {total} faults, {seen} were noticed: {fast} by the fast lane, {slow} by slower tests, and {engine} only by
tests that start an engine. Tests were written for the others, and now {killed} of {total} are noticed without an
engine.

## Run it

`make seeded-faults` plants each fault in a copy of the tree, and runs the tests that must notice it. `ARGS` chooses:

```bash
make seeded-faults ARGS="--only adapter-by-name-alone"
make seeded-faults ARGS="--save"    # plant all of them, and write this page
```

The faults are in `scripts/seeded_faults.toml`, with the text that is replaced. When that text changes, a test says that
the fault must be planted elsewhere.

## The faults

The last two columns say which tests noticed the fault when it was chosen, and which test notices it now.

fault | file | what is wrong | what a user would see | at first | now
---|---|---|---|---|---
"""


@dataclass(frozen=True)
class Fault:
    """One mistake, as the list has it."""

    id: str
    file: str
    old: str
    new: str
    fault: str
    breaks: str
    first: Literal["fast", "slow", "engine", "none"]
    """Which tests noticed it when it was chosen: of the fast lane, slower ones, only those with an engine, or none."""
    tests: tuple[str, ...]

    def planted_in(self, source: str) -> str:
        """The file's text with the fault. Raises: ValueError where it can't be planted."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.id}: its text stands {count} times in {self.file}, expected once")
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """What became of one fault. test: the first one that failed, or what else noticed it."""

    fault: Fault
    state: State
    test: str = ""


def faults() -> list[Fault]:
    """The list. Raises: TypeError where a fault lacks a value, or has another."""
    found = tomllib.loads(LIST.read_text(encoding="utf-8"))["fault"]
    return [Fault(**{**one, "tests": tuple(one["tests"])}) for one in found]


class Copy:
    """A copy of the tree's files that git knows or would know, in a temporary directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=REPO, check=True, capture_output=True, text=True).stdout.split("\0"):
            source, target = REPO / name, root / name
            if name and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python in the copy. Raises: subprocess.TimeoutExpired."""
        path = os.pathsep.join(str(self.root / part) for part in ("", "tools"))
        # A planted file can have the size and the second of the one before it, by which Python knows its bytecode.
        environ = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=self.root, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )

    def outcome(self, fault: Fault, tests: Sequence[str]) -> Outcome:
        """Plant a fault, run tests, and take it out again. Raises: RuntimeError where the tests say nothing of it."""
        place = self.root / fault.file
        source = place.read_text(encoding="utf-8")
        place.write_text(fault.planted_in(source), encoding="utf-8")
        try:
            done = self.run(*PYTEST, *tests)
            if done.returncode == 0:
                return Outcome(fault, "survived")
            if self.run("-c", f"import {module_of(fault.file)}").returncode:
                return Outcome(fault, "broken")
            if done.returncode in (1, 2) and (test := first_failure(done.stdout)):
                return Outcome(fault, "killed", test)
            raise RuntimeError(f"{fault.id}: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr}")
        except subprocess.TimeoutExpired:
            return Outcome(fault, "killed", f"its tests did not end within {TIMEOUT_S} s")
        finally:
            place.write_text(source, encoding="utf-8")


def module_of(file: str) -> str:
    """The name by which a file of the package is imported."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def first_failure(output: str) -> str:
    """The first test that failed, of pytest's summary; without what it was parametrized with. Empty where none is."""
    found = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", output, re.MULTILINE)
    return found[1] if found else ""


def page(outcomes: Iterable[Outcome]) -> str:
    """The page of all faults."""
    said = list(outcomes)
    first = Counter(one.fault.first for one in said)
    counts = {name: first[name] for name in ("fast", "slow", "engine")}
    killed = sum(one.state == "killed" for one in said)
    head = INTRODUCTION.format(**counts, seen=sum(counts.values()), killed=killed, total=len(said))
    return head + "".join(row(one) + "\n" for one in said)


def row(one: Outcome) -> str:
    """A fault's row of the table."""
    noticed = f"`{one.test}`" if "::" in one.test else one.test or one.state
    fault, file = one.fault, one.fault.file.removeprefix("vllm_mmcache/")
    return f"{fault.id} | `{file}` | {fault.fault} | {fault.breaks} | {fault.first} | {noticed}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant the faults that were asked for, and say what became of them; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.seeded_faults", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="ID", help="these faults alone")
    parser.add_argument("--save", action="store_true", help="write docs/seeded_faults.md; not with --only or --tests")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, help="arguments of pytest, in place of the faults' tests")
    chosen = parser.parse_args(arguments)
    if chosen.save and (chosen.only or chosen.tests):
        parser.error("--save is of all faults and their own tests: leave out --only and --tests")
    known = {one.id: one for one in faults()}
    if unknown := set(chosen.only or ()) - known.keys():
        parser.error(f"no fault of that id: {', '.join(sorted(unknown))}")
    planted = [known[name] for name in chosen.only or known]
    with tempfile.TemporaryDirectory(prefix="seeded-faults-") as folder:
        copy = Copy(Path(folder))
        wanted = chosen.tests or sorted({test for one in planted for test in one.tests})
        control = copy.run(*PYTEST, *wanted)
        print(control.stdout.strip().splitlines()[-1])
        if control.returncode:
            print(f"the tests fail without a fault:\n{control.stdout}{control.stderr}", file=sys.stderr)
            return 1
        outcomes = []
        for one in planted:
            start = time.monotonic()
            found = copy.outcome(one, chosen.tests or one.tests)
            print(f"{found.state:8} {time.monotonic() - start:4.0f} s  {one.id}  {found.test}", flush=True)
            outcomes.append(found)
    states = Counter(one.state for one in outcomes)
    print(", ".join(f"{count} {state}" for state, count in states.items()), f"of {len(outcomes)}")
    if chosen.save:
        PAGE.write_text(page(outcomes), encoding="utf-8")
    return 0 if states["killed"] == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
