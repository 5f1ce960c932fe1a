# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks use: stock and plugin side by side, each in processes of its own, and the one form of a result.

A result has numbers by case, by what is counted, by side. What is counted carries its unit: time_s, cpu_s,
cached_tokens, tower_runs. Sides are `stock` and `mmcache`, but where a benchmark names others.
"""

import importlib
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "results"
SIDES = ("stock", "mmcache")
NUM_NAMED = 5  # of changed files, in a message

Name = TypeVar("Name", bound=Hashable)
Action = Callable[[], object]
Clock = Callable[[], float]
Numbers = Mapping[str, float]  # by side
Found = dict[str, dict[str, dict[str, float]]]  # by case, by what is counted, by side


@dataclass
class Result:
    """What a benchmark has found so far. `details` have no common form. `problems`: what must not be, in words."""

    found: Found = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, case: str, what: str, numbers: Numbers) -> None:
        """Keep one number of each side, and print it with its ratio to stock's."""
        self.found.setdefault(case, {})[what] = dict(numbers)
        stock = numbers.get("stock", 0)
        shown = (f"{side} {number:.6g}" + (f" ({number / stock:.3f})" if stock and side != "stock" else "")
                 for side, number in numbers.items())  # fmt: skip
        print(f"{case}: {what} {', '.join(shown)}", flush=True)

    def add_sides(self, sides: Mapping[str, Mapping[tuple[str, str], float]]) -> None:
        """Keep what each side has found, by case and what is counted."""
        for key in dict.fromkeys(key for found in sides.values() for key in found):
            self.add(*key, {side: found[key] for side, found in sides.items() if key in found})


def save(path: Path, result: Result, options: Mapping[str, Any]) -> None:
    """Write a result with where it comes from. Raises: ValueError for a number that JSON has not."""
    numbers = [number for case in result.found.values() for sides in case.values() for number in sides.values()]
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{path.stem} found a number that is none: {result.found}")
    content = {**provenance(), "options": dict(options), "found": result.found, "details": result.details}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def committed(name: str) -> dict[str, Any]:
    """The committed result of a benchmark."""
    content: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return content


def provenance() -> dict[str, Any]:
    """Commit, processor, cores, Python and vLLM versions, and the command."""
    from vllm.version import __version__ as vllm

    module = sys.modules["__main__"].__spec__
    command = " ".join(["python", "-m", module.name if module else "?", *sys.argv[1:]])
    python = platform.python_version()
    return {"commit": commit(), "machine": processor(), "python": python, "vllm": vllm, "command": command}


def processor() -> str:
    """The processor's name, and its cores."""
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search("model name.*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return f"{named[1] if named else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def commit(checkout: Path | None = None) -> str:
    """A checkout's commit, with + where its tracked files differ from it; that of this project if none is given.

    Committed results may differ. BENCH_COMMIT, where it is set, is the commit: it is for files without a repository.
    Empty where no commit is known.
    """
    if named := os.environ.get("BENCH_COMMIT"):
        return named
    named = (_git(checkout, "describe", "--always", "--exclude=*") or "").strip()
    return named + ("+" if named and changed_files(checkout, untracked=False) != [] else "")


def last_change(*paths: str) -> str:
    """The last commit of this project that changed one of these, with + where their files differ from it.

    Empty where no commit is known.
    """
    named = (_git(None, "log", "-1", "--format=%h", "--", *paths) or "").strip()
    return named + ("+" if named and _git(None, "status", "--porcelain", "--", *paths) else "")


def changed_files(checkout: Path | None = None, untracked: bool = True) -> list[str] | None:
    """The files of a checkout, other than committed results, that differ from its commit; None where git can't say."""
    untracked_files = f"--untracked-files={'all' if untracked else 'no'}"
    said = _git(checkout, "status", "--porcelain", untracked_files, "--", ".", ":(exclude)benchmarks/results")
    return None if said is None else [line[3:] for line in said.splitlines()]  # a name follows two letters and a space


def why_not_to_commit(checkout: Path | None = None) -> str:
    """Why what is measured in a checkout must not be committed, in words; empty where nothing is against it."""
    if changed := changed_files(checkout):
        more = f" and {len(changed) - NUM_NAMED} more" if len(changed) > NUM_NAMED else ""
        return f"files differ from the commit: {', '.join(changed[:NUM_NAMED])}{more}"
    named = commit(checkout)
    if not named:
        return f"git knows no commit of {checkout or ROOT}"
    return f"the files are those of a changed tree: {named}" if named.endswith("+") else ""


def _git(checkout: Path | None, *arguments: str) -> str | None:
    """What git prints about a checkout; None where it fails, or where there is no git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=checkout or ROOT, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout


def run_worker(call: str, side: str, environ: Mapping[str, str] | None = None, **arguments: Any) -> Any:
    """What a function `benchmarks.module:name` gives on one side, in a fresh process.

    The only difference between the sides is MMCACHE_DISABLE, and the plugin's settings where some are given:
    BENCH_MMCACHE_FEATURES=1 is MMCACHE_FEATURES=1 on that side. `environ`: further variables. Every side but the
    plugin's is stock. Raises: RuntimeError with the last traceback of stderr, or its end.
    """
    variables = {k: v for k, v in os.environ.items() if not k.startswith("MMCACHE_")}
    variables |= {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", **(environ or {})}
    if side == "mmcache":
        variables |= {k.removeprefix("BENCH_"): v for k, v in variables.items() if k.startswith("BENCH_MMCACHE_")}
    else:
        variables["MMCACHE_DISABLE"] = "1"
    command = [sys.executable, "-c", "from benchmarks import results; results.work()"]
    task = json.dumps({"call": call, **arguments})
    done = subprocess.run(command, input=task, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{call} on {side} failed:\n{last_traceback(done.stderr)[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def last_traceback(text: str) -> str:
    """The last traceback in what a process has said, without what comes behind it; all of the text if there is none."""
    _, said, rest = text.rpartition("Traceback (most recent call last):")
    if not said:
        return text
    lines = rest.splitlines()
    ends = (number for number, line in enumerate(lines[1:], 1) if re.match(r"(\[rank\d+\]: )?[A-Za-z_]", line))
    return said + "\n".join(lines[: next(ends, len(lines)) + 1])


def work() -> None:
    """What that process does: the task is JSON on stdin, what the function gives is the last line of stdout.

    The function gets a folder for models, which is there for this process alone unless the task names one: `root`.
    """
    task: dict[str, Any] = json.load(sys.stdin)
    module, _, name = task.pop("call").partition(":")
    function = getattr(importlib.import_module(module), name)
    with tempfile.TemporaryDirectory() as root:
        print(json.dumps(function(Path(task.pop("root", root)), **task)), flush=True)


def in_turn(repeats: int, sides: Iterable[str] = SIDES) -> list[str]:
    """Each side so often, in turn, the one that goes first changing: two processes of one side differ by 5 to 15 %."""
    order = list(sides)
    return [side for number in range(repeats) for side in (order[::-1] if number % 2 else order)]


def medians(
    work: Mapping[Name, Callable[[], Action]], rounds: int, warm_up: int = 0, clock: Clock = time.perf_counter
) -> dict[Name, float]:
    """Median seconds of pieces of work that are done in turn in this process, by name.

    Each piece gives, for each round, what is then timed; rounds of the warm-up are not counted.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in work}
    for number in range(warm_up + rounds):
        for name, prepare in work.items():
            action, start = prepare(), clock()
            action()
            if number >= warm_up:
                seconds[name].append(clock() - start)
    return {name: median(found) for name, found in seconds.items()}
