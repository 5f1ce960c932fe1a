# SPDX-License-Identifier: Apache-2.0
"""Checks the rooms that touch the engine on a machine with an NVIDIA GPU: exactness first, then short benchmarks.

python -m benchmarks.gpu_check.run [--families gemma3] [--rooms features] [--runners V2] [--short] [--record]

Runs with the interpreter that has vLLM, and installs nothing into it. Writes results/<machine>.json; a later run on the
same machine with the same vLLM adds to it. --platform cpu does the same on the CPU, to try the command.

Exit codes: 0 all that could be checked passed, 1 something failed, 2 nothing could be checked, 3 --seconds ended it.
"""

import argparse
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import found as here
from benchmarks.machine import commit
from vllm_mmcache.upstream.proven import ENGINE_ROOMS
from vllm_mmcache.zoo import FIRST_FAMILIES

EVERY_PLATFORM = {
    "lazy_media, lifted_bodies, identity, pixels": "in the API server, which has no CUDA part; `make test` covers them",
    "more than one GPU": "every engine here has one",
}
BENCHMARK_S = 1800.0
CPU = {
    "compiled": "--platform cpu runs eagerly",
    "Triton's compiler": "model runner V2 runs in Triton's interpreter here",
}


def main() -> int:
    """Check, print, write; returns the exit code."""
    options = parse()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        found = here.look(options.platform)
    except here.Refused as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPATH"] = here.make_plugin_path(Path(folder) / "plugin")
        os.chdir(here.REPO)
        return check(found, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--platform", choices=("cuda", "rocm", "cpu"), default="cuda")
    parser.add_argument("--families", nargs="+", choices=FIRST_FAMILIES, default=list(FIRST_FAMILIES))
    parser.add_argument("--rooms", nargs="+", choices=("stock", *ENGINE_ROOMS, "all"), help="these items alone")
    parser.add_argument("--runners", nargs="+", choices=("V1", "V2"), help="vLLM's model runners; default: both")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), help="default: bfloat16 on CUDA")
    parser.add_argument("--benchmarks", nargs="*", help="these alone; none after the option is none at all")
    parser.add_argument("--short", action="store_true", help="all rooms together alone, few scenarios, no benchmarks")
    parser.add_argument("--jobs", type=int, default=1, help="engines at a time; on a GPU 2 GiB of its memory each")
    parser.add_argument("--seconds", type=float, help="start nothing later; go on where an earlier run was stopped")
    parser.add_argument("--log", type=Path, help="a file for all that the engines' processes say")
    parser.add_argument("--results", type=Path, help="this file instead of results/<machine>.json")
    parser.add_argument("--record", action="store_true", help="put the rooms that are proven into the plugin's table")
    return parser.parse_args()


def check(found: here.Found, options: argparse.Namespace) -> int:
    """Run the items and the benchmarks, and say what was found."""
    from benchmarks import summary
    from benchmarks.catalogue import BENCHMARKS
    from benchmarks.gpu_check import results
    from vllm_mmcache.prove.items import OutOfTime

    path = (options.results or results.path_of(found.machine)).resolve()
    result = results.load(path, found)
    print(f"{found.machine}: {found.distribution}, platform {found.platform}, model runners {', '.join(found.runners)}")
    end = time.monotonic() + (options.seconds or math.inf)

    def keep() -> None:
        results.save(path, result)

    ran, not_reached = run_items(found, options, result["items"], keep, end)
    measured: dict[str, Any] = {}
    wanted = options.benchmarks
    if wanted is None:
        wanted = [] if options.short else [name for name, one in BENCHMARKS.items() if not one.not_on_gpu]
    for name in wanted:
        if options.seconds and result["benchmarks"].get(name, {}).get("commit") == commit():
            continue
        try:
            outcome = benchmark(name, end - time.monotonic())
        except OutOfTime:
            not_reached.append(f"benchmark {name}")
            continue
        measured[name] = result["benchmarks"][name] = {**outcome, "commit": commit()}
        print(f"benchmark {name}: {outcome['state']}: {outcome['reason']}", flush=True)
        keep()
    result["not_checked"] = left_out(found, options.platform)
    results.save(path, result)

    print("\n" + "\n".join(table(ran)))
    if any("result" in one for one in measured.values()):
        print("\n" + summary.table({name: one["result"] for name, one in measured.items() if "result" in one}))
    print("\nNot checked:")
    print("\n".join(f"- {what}: {why}" for what, why in result["not_checked"].items()))
    if options.record:
        for runner, rooms in results.record(result, path).items():
            print(f"\nrecorded as proven on {found.platform}, model runner {runner}: {', '.join(rooms) or 'nothing'}")
    if not_reached:
        print(f"\nNot reached in {options.seconds} s; the same command again goes on: {'; '.join(not_reached)}")
    print(f"\nwritten: {path}")
    if options.seconds:  # what an earlier call found counts as well
        ran, measured = (
            {name: one for name, one in result[kind].items() if one.get("commit") == commit()}
            for kind in ("items", "benchmarks")
        )
    code = exit_code(ran, measured)
    return 3 if not_reached and code != 1 else code


def benchmark(name: str, left_s: float) -> dict[str, Any]:
    """Run a benchmark in its short form, every room on: its state and reason, and its result where there is one.

    Raises: OutOfTime after `left_s`.
    """
    from benchmarks import bench
    from vllm_mmcache.prove.items import OutOfTime

    if left_s <= 0:
        raise OutOfTime
    environ = {f"BENCH_MMCACHE_{room.upper()}": "1" for room in ENGINE_ROOMS} | {"VLLM_PLUGINS": "mmcache"}
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = bench.run(name, Path(folder), environ, min(left_s, BENCHMARK_S))
        except (bench.Failed, TimeoutError) as error:
            if isinstance(error, TimeoutError) and left_s < BENCHMARK_S:
                raise OutOfTime from None
            return {"state": "failed", "reason": " ".join(str(error).split())[-300:]}
    return {"state": "passed", "reason": "ran to its end", "result": result}


def run_items(
    found: here.Found, options: argparse.Namespace, items: dict[str, Any], save: Callable[[], None], end: float
) -> tuple[dict[str, Any], list[str]]:
    """Run what the options leave of the plan, a line for each. Fills `items`; returns those of this run.

    With --seconds, what an earlier run of this commit found is not run again; second are the names that time was too
    short for. `end` is a time of time.monotonic(). Stock comes before the items that are compared with it.
    """
    from vllm_mmcache.prove.items import MORE, How, Item, OutOfTime, plan
    from vllm_mmcache.prove.runs import Runs

    runs = Runs(How(options.precision, options.short, options.log, environments(found.platform)), end)
    ran: dict[str, Any] = {}
    not_reached: list[str] = []

    def go(item: Item) -> dict[str, Any]:
        start = time.monotonic()
        outcome = {name: value for name, value in runs.run(item).items() if name not in MORE}
        print(f"{item.name}: {outcome['state']}: {outcome['reason']} ({time.monotonic() - start:.0f} s)", flush=True)
        return {**outcome, "commit": commit()}

    runners = [one for one in found.runners if one in (options.runners or found.runners)]
    for _, group in itertools.groupby(
        plan(options.families, runners, found.platform != "cpu", options.short),
        key=lambda item: (item.runner, bool(item.rooms)),
    ):
        todo = []
        for item in group:
            name = "all" if item.what == "all rooms" else item.rooms[0] if item.rooms else "stock"
            known = bool(options.seconds) and items.get(item.name, {}).get("commit") == commit()
            if known or (options.rooms and name not in options.rooms):
                if not item.rooms and item.name in items:
                    runs.stocks[item.setting] = items[item.name]  # what an earlier run found
            else:
                todo.append(item)
        with ThreadPoolExecutor(options.jobs) as pool:
            for item, running in [(item, pool.submit(go, item)) for item in todo]:
                try:
                    ran[item.name] = items[item.name] = running.result()
                except OutOfTime:
                    not_reached.append(item.name)
                    continue
                save()
    return ran, not_reached


def environments(platform: str) -> dict[str, dict[str, str]]:
    """What the model runners need on a platform: on the CPU the second has Triton's interpreter, as in tests."""
    if platform != "cpu":
        return {}
    from tests.engine_configuration import CONFIGURATIONS

    return {
        runner: {"TEST_ENGINE": name, **CONFIGURATIONS[name].environment()}
        for runner, name in (("V1", "v1"), ("V2", "v2-async"))
    }


def left_out(found: here.Found, platform: str) -> dict[str, str]:
    """What no run of this command checks here, and why."""
    from benchmarks.catalogue import BENCHMARKS

    runners = {} if "V2" in found.runners else {"model runner V2": here.why_no_v2(found.platform)}
    benchmarks = {f"benchmark {name}": one.not_on_gpu for name, one in BENCHMARKS.items() if one.not_on_gpu}
    return EVERY_PLATFORM | (CPU if platform == "cpu" else {}) | runners | benchmarks


def table(ran: dict[str, Any]) -> list[str]:
    """The items of this run as Markdown."""
    lines = ["| family | rooms | model runner | engine | state | reason |", "|---|---|---|---|---|---|"]
    for name, outcome in ran.items():
        cells = [*name.split(", "), outcome["state"], outcome["reason"].replace("|", "\\|")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def exit_code(ran: dict[str, Any], measured: dict[str, Any]) -> int:
    """0 where something was checked and none of it failed; stock's own failures are shown, not counted."""
    states = [outcome["state"] for name, outcome in ran.items() if ", stock vLLM, " not in name]
    states += [outcome["state"] for outcome in measured.values()]
    return 1 if "failed" in states else 0 if "passed" in states else 2


if __name__ == "__main__":
    sys.exit(main())
