# SPDX-License-Identifier: Apache-2.0
"""Checks the rooms that touch the engine on a machine with an NVIDIA GPU: exactness first, then short benchmarks.

python -m benchmarks.gpu_check.run [--families gemma3] [--rooms features] [--runners V2] [--short] [--record]

Runs with the interpreter that has vLLM, and installs nothing into it. Writes results/<machine>.json; a later run on the
same machine with the same vLLM adds to it. --platform cpu does the same on the CPU, to try the command.

Exit codes: 0 all that could be checked passed, 1 something failed, 2 nothing could be checked.
"""

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import found as here
from benchmarks.machine import commit
from vllm_mmcache.upstream.proven import ENGINE_ROOMS
from vllm_mmcache.zoo import FIRST_FAMILIES

EVERY_PLATFORM = {
    "lazy_media, lifted_bodies, identity": "run in the API server, which has no CUDA part; `make test` covers them",
    "more than one GPU": "every engine here has one",
}
CPU = {"compiled": "--platform cpu runs eagerly"}


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
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--families", nargs="+", choices=FIRST_FAMILIES, default=list(FIRST_FAMILIES))
    parser.add_argument("--rooms", nargs="+", choices=("stock", *ENGINE_ROOMS, "all"), help="these items alone")
    parser.add_argument("--runners", nargs="+", choices=("V1", "V2"), help="vLLM's model runners; default: both")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), help="default: bfloat16 on CUDA")
    parser.add_argument("--benchmarks", nargs="*", help="these alone; none after the option is none at all")
    parser.add_argument("--short", action="store_true", help="all rooms together alone, few scenarios, no benchmarks")
    parser.add_argument("--results", type=Path, help="this file instead of results/<machine>.json")
    parser.add_argument("--record", action="store_true", help="put the rooms that are proven into the plugin's table")
    return parser.parse_args()


def check(found: here.Found, options: argparse.Namespace) -> int:
    """Run the items and the benchmarks, and say what was found."""
    from benchmarks.gpu_check import benches, results

    path = (options.results or results.path_of(found.machine)).resolve()
    result = results.load(path, found)
    print(f"{found.machine}: {found.distribution}, platform {found.platform}, model runners {', '.join(found.runners)}")
    ran = run_items(found, options, result["items"], lambda: results.save(path, result))
    measured: dict[str, Any] = {}
    wanted = [] if options.short else list(benches.SHORT) if options.benchmarks is None else options.benchmarks
    for name in wanted:
        measured[name] = result["benchmarks"][name] = benches.run(name)
        print(f"benchmark {name}: {measured[name]['state']}: {measured[name]['reason']}", flush=True)
        results.save(path, result)
    result["not_checked"] = left_out(found, options.platform)
    results.save(path, result)

    print("\n" + "\n".join(table(ran)))
    if any("result" in one for one in measured.values()):
        print("\n" + "\n".join(benches.table(measured)))
    print("\nNot checked:")
    print("\n".join(f"- {what}: {why}" for what, why in result["not_checked"].items()))
    if options.record:
        rooms = results.record(result, path)
        print(f"\nrecorded as proven on {found.platform}: {', '.join(rooms) or 'nothing'}")
    print(f"\nwritten: {path}")
    return exit_code(ran, measured)


def run_items(found: here.Found, options: argparse.Namespace, items: dict[str, Any], save: Any) -> dict[str, Any]:
    """Run what the options leave of the plan; a line for each. Fills `items`, and returns those of this run."""
    from benchmarks.gpu_check.items import plan, run, unrunnable

    runners = [one for one in found.runners if one in (options.runners or found.runners)]
    stocks: dict[Any, Any] = {}
    ran: dict[str, Any] = {}
    for item in plan(options.families, runners, found.platform != "cpu", options.short):
        name = "all" if item.what == "all rooms" else item.rooms[0] if item.rooms else "stock"
        if options.rooms and name not in options.rooms:
            if not item.rooms and item.name in items:
                stocks[item.setting] = items[item.name]  # what an earlier run found
            continue
        start = time.perf_counter()
        outcome = run(item, options.precision, options.short, stocks.get(item.setting))
        if item.rooms and outcome["state"] == "failed" and "engine" not in outcome and item.setting not in stocks:
            # Was it the plugin? Stock on the same engine tells.
            stocks[item.setting] = run(dataclasses.replace(item, rooms=()), options.precision, True, None)
            if "engine" not in stocks[item.setting]:
                outcome = unrunnable(stocks[item.setting])
        if not item.rooms:
            stocks[item.setting] = outcome
        ran[item.name] = items[item.name] = {**outcome, "commit": commit()}
        seconds = time.perf_counter() - start
        print(f"{item.name}: {outcome['state']}: {outcome['reason']} ({seconds:.0f} s)", flush=True)
        save()
    return ran


def left_out(found: here.Found, platform: str) -> dict[str, str]:
    """What no run of this command checks here, and why."""
    from benchmarks.gpu_check.benches import LEFT_OUT

    runners = {} if "V2" in found.runners else {"model runner V2": f"vLLM {found.vllm} has no {here.SWITCH}"}
    benchmarks = {f"benchmark {name}": why for name, why in LEFT_OUT.items()}
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
