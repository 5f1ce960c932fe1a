# SPDX-License-Identifier: Apache-2.0
"""The trial at start, on engines that are right: how long it is, and whether it ever switches something off.

Engines of the zoo start in turn, each in a process of its own, with every component tried. What the trial's line in
the log says is kept: its requests, its seconds and what was exact. A component that differed, or could not be tried, is
a false alarm: these engines are healthy. Steps, tokens and pictures are counted beside it, for estimates of other
machines.

The first start of each case has the machine for itself, and its seconds count. Of the others, so many run at once as
--at-once says. Each start is kept in STARTS. One of the same files, those of OF_A_START, is not repeated unless --again
is given: a run that was cut off goes on. MMCACHE_TRIAL_S is larger than users have it, so that a slow machine is a
number here and no false alarm. On model runner V2 the kernels are interpreted, and seconds say nothing of a GPU.
"""

import json
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice, product, repeat
from pathlib import Path
from typing import Any

from benchmarks.replays import started
from benchmarks.results import ROOT, Result, last_change, run_worker
from tests.support.engine_configuration import CONFIGURATIONS
from vllm_mmcache.trial.sequence import Trial
from vllm_mmcache.trial.verdict import Verdict
from vllm_mmcache.trial.vllm_engine import TrialEngine

STARTS = ROOT / ".artifacts" / "trial" / "starts.jsonl"
OF_A_START = (
    "vllm_mmcache",
    "tools",
    "tests/support",
    "benchmarks/trial.py",
    "benchmarks/replays.py",
    "pyproject.toml",
)
TRIAL_S = 600
COUNTED = ("requests", "steps", "prompt_tokens", "cached_tokens", "computed_tokens", "tower_images", "seconds")

Start = dict[str, Any]


def measure(options: Namespace) -> Result:
    """By family and engine what a trial takes, the most of its starts; and the false alarms of all starts."""
    result, starts = Result(), list[Start]()
    for start in all_starts(options):
        if "failed" in start:  # the next run tries it again
            result.problems.append(f"failed: {start['case']}: {start['failed']}")
            print(result.problems[-1], flush=True)
        else:
            starts.append(start)
            print(f"start {len(starts)} of {options.starts}: {json.dumps(start)}", flush=True)
    for case in dict.fromkeys(start["case"] for start in starts):
        of_case = [start for start in starts if start["case"] == case]
        for what in COUNTED:
            numbers = [start[what] for start in of_case if start["alone"] or what != "seconds"]
            result.add(case, what, {"mmcache": max(numbers)} if numbers else {})
        result.details[case] = {"starts": len(of_case), "exact": sorted(of_case[0]["exact"])}
    alarms = [f"{start['case']}: {component}: {why}" for start in starts for component, why in start["off"].items()]
    result.add("all starts", "starts", {"mmcache": len(starts)})
    result.add("all starts", "false_alarms", {"mmcache": len(alarms)})
    result.problems += [f"a false alarm on {alarm}" for alarm in alarms]
    return result


def all_starts(options: Namespace) -> Iterator[Start]:
    """All starts of a run, its cases in turn: the first of each case one by one, the others several at once.

    Starts that were saved by an earlier run of the same files come first in each of the two parts, and are not
    repeated. A start that fails has only `case` and `failed`, and is not saved.
    """
    cases = [f"{family}, {engine}" for family, engine in product(options.families, options.engines)]
    order = list(islice(cycle(cases), options.starts))
    files = last_change(*OF_A_START)
    known = [] if options.again else kept(files)

    def begin(case: str, alone: bool) -> Start:
        try:
            return {"case": case, "files": files, "alone": alone, **try_one(case, root)}
        except RuntimeError as error:
            return {"case": case, "failed": str(error)}

    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(options.at_once) as at_once:
        for run, part, alone in (map, order[: len(cases)], True), (at_once.map, order[len(cases) :], False):
            missing = list[str]()
            for case in part:
                found = next((start for start in known if (start["case"], start["alone"]) == (case, alone)), None)
                if found is None:
                    missing.append(case)
                else:
                    known.remove(found)
                    yield found
            for found in run(begin, missing, repeat(alone)):
                if "failed" not in found:
                    keep(found)
                yield found


def kept(files: str) -> list[Start]:
    """What STARTS has of the files of one commit."""
    lines = STARTS.read_text().splitlines() if STARTS.exists() else []
    return [start for start in map(json.loads, lines) if start["files"] == files]


def keep(start: Start) -> None:
    """Write a start behind the others at once, for the next run."""
    STARTS.parent.mkdir(parents=True, exist_ok=True)
    with STARTS.open("a") as file:
        file.write(json.dumps(start) + "\n")


def try_one(case: str, root: str) -> dict[str, Any]:
    """Start the engine of a case. Raises: RuntimeError, where it does not start, or has no trial."""
    family, *precision, engine = case.split(", ")
    with tempfile.TemporaryDirectory() as state:
        environ = {"MMCACHE_TRIAL_ALL": "1", "MMCACHE_TRIAL_S": str(TRIAL_S), "XDG_STATE_HOME": state}
        environ |= CONFIGURATIONS[engine].environment()
        call = "benchmarks.trial:trial_of"
        found = run_worker(call, "mmcache", environ, root=root, family=family, precision="".join(precision) or None)
    if found is None:
        raise RuntimeError("there was no trial")
    return dict(found)


def trial_of(root: Path, family: str, precision: str | None) -> dict[str, Any] | None:
    """What the trial of one engine found, as its line in the log says; None without one."""
    counts, verdicts = count(), list[Verdict]()
    run = Trial.run

    def run_and_keep(self: Trial) -> Verdict:
        verdicts.append(run(self))
        return verdicts[-1]

    Trial.run = run_and_keep  # type: ignore[method-assign]
    with started(root, family, {}, max_tokens=4096, precision=precision):
        if not verdicts:
            return None
    (verdict,) = verdicts
    return {
        **counts,
        "requests": verdict.num_requests,
        "seconds": round(verdict.seconds, 2),
        "exact": verdict.passed,
        "off": {name: verdict.reason_of(name) for name in (*verdict.differed, *verdict.untried)},
    }


def count() -> Counter[str]:
    """Count what trials of this process ask and compute, from now on."""
    counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
    make, ask = TrialEngine.__init__, TrialEngine.ask

    def make_and_count(self: TrialEngine, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        scheduler = type(self.scheduler)
        schedule = scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            step = schedule(*args, **kwargs)
            counts["steps"] += step.total_num_scheduled_tokens > 0
            counts["computed_tokens"] += step.total_num_scheduled_tokens
            return step

        scheduler.schedule = counted

    def ask_and_count(self: TrialEngine, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        reply = ask(self, prompt, *args, **kwargs)
        counts["prompt_tokens"] += len(prompt.token_ids)
        counts["cached_tokens"] += reply.num_cached_tokens
        counts["tower_images"] += reply.tower_images
        return reply

    TrialEngine.__init__ = make_and_count  # type: ignore[method-assign]
    TrialEngine.ask = ask_and_count  # type: ignore[method-assign]
    return counts
