# SPDX-License-Identifier: Apache-2.0
"""The trial at start, on engines that are right: how long it is, and whether it ever switches something off.

Engines of the zoo start in turn, each in a process of its own, with every component tried. What the trial's line in
the log says is kept: its requests, its seconds and what was exact. A component that differed, or could not be tried, is
a false alarm: these engines are healthy. Steps, tokens and pictures are counted beside it, for estimates of other
machines.

Each start is kept in STARTS, and one of this commit is not repeated unless --again is given: a run that was cut off
goes on. MMCACHE_TRIAL_S is larger than users have it, so that a slow machine is a number here and no false alarm. On
model runner V2 the kernels are interpreted, and seconds say nothing of a GPU.
"""

import json
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

from benchmarks.replays import started
from benchmarks.results import ROOT, Result, commit, run_worker
from tests.support.engine_configuration import CONFIGURATIONS
from vllm_mmcache.trial.sequence import Trial
from vllm_mmcache.trial.verdict import Verdict
from vllm_mmcache.trial.vllm_engine import TrialEngine

STARTS = ROOT / ".artifacts" / "trial" / "starts.jsonl"
TRIAL_S = 600
COUNTED = ("requests", "steps", "prompt_tokens", "cached_tokens", "computed_tokens", "tower_images", "seconds")

Start = dict[str, Any]


def measure(options: Namespace) -> Result:
    """By family and engine what a trial takes, the most of its starts; and the false alarms of all starts."""
    result, starts = Result(), list[Start]()
    with tempfile.TemporaryDirectory() as root:
        for case, kept in planned(options):
            try:
                starts.append(kept or keep(STARTS, case, try_one(case, root)))
            except RuntimeError as error:  # an engine that does not start; the next run tries it again
                result.problems.append(f"failed: {case}: {error}")
                print(result.problems[-1], flush=True)
                continue
            print(f"start {len(starts)} of {options.starts}: {case}: {json.dumps(starts[-1])}", flush=True)
    for case in dict.fromkeys(start["case"] for start in starts):
        of_case = [start for start in starts if start["case"] == case]
        for what in COUNTED:
            result.add(case, what, {"mmcache": max(start[what] for start in of_case)})
        result.details[case] = {"starts": len(of_case), "exact": sorted(of_case[0]["exact"])}
    alarms = [f"{start['case']}: {component}: {why}" for start in starts for component, why in start["off"].items()]
    result.add("all starts", "starts", {"mmcache": len(starts)})
    result.add("all starts", "false_alarms", {"mmcache": len(alarms)})
    result.problems += [f"a false alarm on {alarm}" for alarm in alarms]
    return result


def planned(options: Namespace) -> Iterator[tuple[str, Start | None]]:
    """The cases of all starts, in turn, each with a start of this commit that is kept already."""
    here = commit()
    lines = STARTS.read_text().splitlines() if STARTS.exists() and not options.again else []
    known = [start for start in map(json.loads, lines) if start["commit"] == here]
    cases = [f"{family}, {engine}" for family, engine in product(options.families, options.engines)]
    for case in islice(cycle(cases), options.starts):
        kept = next((start for start in known if start["case"] == case), None)
        if kept is not None:
            known.remove(kept)
        yield case, kept


def keep(path: Path, case: str, found: dict[str, Any]) -> Start:
    """Write a start behind the others at once, for the next run."""
    start = {"case": case, "commit": commit(), **found}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(start) + "\n")
    return start


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
