# SPDX-License-Identifier: Apache-2.0
"""The benchmarks that are requests to one engine of each side: what is asked, and what stays between two processes.

Of each case and family the result has the median time of a request, tokens cached and the best possible, runs of the
vision tower, pictures decoded, and how many answers are another than stock's, over the requests that count.
"""

import tempfile
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks import workloads
from benchmarks.results import Result
from benchmarks.servers import stored
from benchmarks.sides import SIDES, in_turn, run_worker
from benchmarks.workloads import SHAPES, Asks, image_service, marked, rotation
from vllm_mmcache.prove.workloads import questions
from vllm_mmcache.zoo import ZooOptions

WORKER = "benchmarks.engines:replay"
COUNTED = ("cached_tokens", "best_tokens", "whole_request_tokens", "prompt_tokens", "tower_runs", "decodes")
ROOMS = ("image_checkpoints", "features")


@dataclass(frozen=True)
class Case:
    """One workload. Cases of a benchmark without a store share a process, and each is asked from cold."""

    asks: Callable[[Namespace, str], Asks]
    """Called with the options and the family, in the worker."""
    store: str = ""
    """`disk` or `valkey`: where the plugin keeps features."""
    restarted: bool = False
    """Another process with the same store is asked the same before."""
    kv_share: float = 0.0
    """Of the KV that all requests take together: the size of the cache; 0 is vLLM's default."""


@dataclass(frozen=True)
class Replay:
    """Cases by name. `engine`: of EngineConfig, beside vLLM's own block size and token budget."""

    cases: Mapping[str, Case]
    engine: Mapping[str, Any]
    zoo: ZooOptions | None = None
    max_tokens: int = 1
    wanted: Callable[[Namespace, str], bool] = field(default=lambda options, case: True)


def about_images(make: Callable[..., Any], *numbers: int) -> Case:
    return Case(lambda options, family: marked(make(SHAPES[family], *numbers)))


LONG = {"max_tokens": 9216, "num_images": 10}
WHOLE_SCREENS = {"max_tokens": 16384, "num_images": 9}

REPLAYS: dict[str, Replay] = {
    "image_questions": Replay(
        {
            "20 images x 2 questions": about_images(questions, 20, 2),
            "20 images x 5 questions, interleaved": about_images(workloads.interleaved, 20, 5),
            "two demo images, varying query image, 20 queries": about_images(workloads.demos, 20),
            "conversation that adds an image each turn, 10 turns": about_images(workloads.growing, 10),
            "text first, then image, then question": about_images(workloads.shifted, 6, 3),
            "every picture once, KV for a tenth": Case(
                lambda options, family: marked(workloads.unique(SHAPES[family], options.unique)), kv_share=0.1
            ),
        },
        LONG,
        max_tokens=4,
        wanted=lambda options, case: bool(options.unique) or "once" not in case,
    ),
    "cold_requests": Replay(
        {
            "cold": Case(lambda options, family: workloads.cold(family, options.rounds)),
            "rooms in turn": Case(lambda options, family: workloads.rooms_in_turn(family, options.pairs, ROOMS)),
        },
        LONG,
    ),
    "agents": Replay(
        {
            "agent replay, 18 turns": Case(lambda options, family: workloads.agent(18)),
            "window of 5 screenshots, 15 turns": Case(lambda options, family: workloads.window(15, 5)),
            "8 tenants x 3 questions": Case(lambda options, family: workloads.tenants(3)),
            "photographs, each once": Case(lambda options, family: workloads.photos(options.photos)),
        },
        {"max_tokens": 9216, "num_images": 8},
        max_tokens=4,
    ),
    "computer_use": Replay(
        {
            f"{live} live": Case(lambda options, family, live=live: workloads.computer_use(options.steps, live))
            for live in (1, 3, 5)
        },
        WHOLE_SCREENS,
        max_tokens=8,
        wanted=lambda options, case: int(case.split()[0]) in options.windows,
    ),
    "image_service": Replay(
        {
            f"{again:.0%} again": Case(lambda options, family, again=again: image_service(options.requests, again))
            for again in (0.0, 0.5)
        },
        WHOLE_SCREENS,
        ZooOptions(max_pixels=1300 * 1024),
        max_tokens=8,
    ),
    "gallery": Replay(
        {
            "in rotation": Case(lambda options, family: rotation(options.images, options.size, 3)),
            "unknown": Case(lambda options, family: workloads.all_new(options.images, options.size), store="disk"),
        },
        {"max_tokens": 4096},
    ),
    "restart": Replay(
        {
            tier: Case(lambda options, family: rotation(options.images, options.size, 1, 0), tier, restarted=True)
            for tier in ("disk", "valkey")
        },
        {"max_tokens": 4096},
        wanted=lambda options, case: case in options.tiers,
    ),
}  # fmt: skip


def measure(name: str, options: Namespace) -> Result:
    """Every family and case on both sides, in turn."""
    result = Result()
    for family in options.families:
        found: dict[str, dict[str, list[Any]]] = {}
        for side in in_turn(options.repeats):
            for case, asked in one_side(name, side, family, options).items():
                found.setdefault(case, {one: [] for one in SIDES})[side] += asked
        for case, sides in found.items():
            add(result, f"{family}, {case}", sides)
    return result


def one_side(name: str, side: str, family: str, options: Namespace) -> dict[str, list[dict[str, Any]]]:
    """The requests of all cases, in as few processes as there may be."""
    replay = REPLAYS[name]
    cases = {one: case for one, case in replay.cases.items() if replay.wanted(options, one)}
    task: dict[str, Any] = {"benchmark": name, "family": family, "options": vars(options)}
    alone = [one for one, case in cases.items() if case.store]
    found: dict[str, list[dict[str, Any]]] = {}
    if together := [one for one in cases if one not in alone]:
        found = run_worker(WORKER, side, cases=together, settings={}, **task)
    for one in alone:
        with stored(cases[one].store) as store, tempfile.TemporaryDirectory() as root:
            for _ in range(1 + cases[one].restarted):
                found |= run_worker(WORKER, side, cases=[one], settings={"store": store}, root=root, **task)
    return found


def add(result: Result, case: str, sides: Mapping[str, list[dict[str, Any]]]) -> None:
    """The numbers of one case, or of the several that its requests belong to."""
    kinds = {request["case"]: None for request in sides["stock"]}
    for kind in kinds:
        kept = {side: [one for one in asked if one["counts"] and one["case"] == kind] for side, asked in sides.items()}
        name = f"{case}, {kind}" if kind else case
        result.add(name, "time_s", {side: median(one["time_s"] for one in asked) for side, asked in kept.items()})
        result.add(name, "last_to_first", {side: last_to_first(asked) for side, asked in kept.items()})
        for what in COUNTED:
            result.add(name, what, {side: sum(one[what] for one in asked) for side, asked in kept.items()})
        others = sum(a["answer"] != b["answer"] for a, b in zip(*kept.values(), strict=True))
        result.add(name, "other_answers", {"mmcache": others})
        result.details[name] = {
            "requests": len(kept["stock"]), "counters": totals(kept["mmcache"]),
            "times_s": {side: [round(one["time_s"], 5) for one in asked] for side, asked in kept.items()},
        }  # fmt: skip


def last_to_first(asked: list[dict[str, Any]]) -> float:
    """Median time in the last quarter by that in the first, the very first request left out."""
    seconds, quarter = [one["time_s"] for one in asked], len(asked) // 4
    return median(seconds[-quarter:]) / median(seconds[1 : quarter + 1]) if quarter else 1.0


def totals(asked: list[dict[str, Any]]) -> dict[str, float]:
    """The plugin's counters, added up."""
    names = sorted({name for one in asked for name in one["counters"]})
    return {name: sum(one["counters"].get(name, 0.0) for one in asked) for name in names}
