# SPDX-License-Identifier: Apache-2.0
"""Checks the components that touch the engine on a machine with an NVIDIA GPU: exactness first, then short benchmarks.

python -m scripts.gpu_check.run [--families gemma3] [--components features] [--runners V2] [--short] [--record]

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
from argparse import Namespace
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from mmcache_tools.prove_zoo.items import ZooHow, plan
from mmcache_tools.zoo import FIRST_FAMILIES

from benchmarks.catalogue import BENCHMARKS
from benchmarks.results import commit
from scripts.gpu_check import found as here
from scripts.gpu_check import results
from vllm_mmcache.base.errors import EnvironmentProblem
from vllm_mmcache.lifecycle.tested_engines import ENGINE_COMPONENTS
from vllm_mmcache.prove.items import MORE, OutOfTime
from vllm_mmcache.prove.runs import Runs

BENCHMARK_S = 1800.0
WORDS = {"stock vLLM": "stock", "all components": "all"}  # of --components

Outcome = dict[str, Any]  # state, reason, commit, and what else was found


def main() -> int:
    """Check, print, write; returns the exit code."""
    options = parse()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        found = here.look(options.platform)
    except EnvironmentProblem as reason:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPATH"] = here.make_plugin_path(Path(folder))
        os.chdir(here.REPO)
        return check(found, options)


def parse() -> Namespace:
    parser = argparse.ArgumentParser(
        "python -m scripts.gpu_check.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--platform", choices=("cuda", "rocm", "cpu"), default="cuda")
    add("--families", nargs="+", choices=FIRST_FAMILIES, default=list(FIRST_FAMILIES))
    add("--components", nargs="+", choices=("stock", *ENGINE_COMPONENTS, "all"), help="these items alone")
    add("--runners", nargs="+", choices=("V1", "V2"), help="vLLM's model runners; default: both")
    add("--precision", choices=("bfloat16", "float32"), help="default: bfloat16 on CUDA")
    add("--benchmarks", nargs="*", help="these alone; none after the option is none at all")
    add("--short", action="store_true", help="all components together alone, few scenarios, no benchmarks")
    add("--jobs", type=int, default=1, help="engines at a time; on a GPU 2 GiB of its memory each")
    add("--seconds", type=float, help="start nothing later; go on where an earlier run was stopped")
    add("--log", type=Path, help="a file for all that the engines' processes say")
    add("--results", type=Path, help="this file instead of results/<machine>.json")
    add("--record", action="store_true", help="put the components that are proven into the plugin's table")
    return parser.parse_args()


def check(found: here.Found, options: Namespace) -> int:
    """Run the items and the benchmarks, and say what was found."""
    from benchmarks import summary

    path = (options.results or results.path_of(found.machine)).resolve()
    run = Run(found, options, path)
    print(f"{found.machine}: vLLM {found.vllm} on {found.platform}, model runners {', '.join(found.runners)}")
    run.items()
    run.benchmarks()
    run.result["not_checked"] = left_out(found)
    results.save(path, run.result)

    print("\n| family | components | model runner | engine | state | reason |", "|---|---|---|---|---|---|", sep="\n")
    for name, outcome in run.ran.items():
        if not name.startswith("benchmark "):
            print("|", " | ".join([*name.split(", "), outcome["state"], outcome["reason"].replace("|", "\\|")]), "|")
    measured = {name.partition(" ")[2]: one["result"] for name, one in run.ran.items() if "result" in one}
    print("\n" + summary.table(measured))
    print("Not checked:", *(f"- {what}: {why}" for what, why in run.result["not_checked"].items()), sep="\n")
    if options.record:
        results.record(run.result, path)
    if run.not_reached:
        print(f"\nNot reached in {options.seconds} s; the same command again goes on: {'; '.join(run.not_reached)}")
    print(f"\nwritten: {path}")
    code = exit_code(run.ran)
    return 3 if run.not_reached and code != 1 else code


class Run:
    """What a call of the command runs: items, then benchmarks; and what is known after it.

    With --seconds what an earlier call found on the same commit is not run again, and counts as well.
    """

    def __init__(self, found: here.Found, options: Namespace, path: Path) -> None:
        self.result = results.load(path, found)
        self.ran: dict[str, Outcome] = {}
        self.not_reached: list[str] = []
        self._found, self._options, self._path = found, options, path
        self._end = time.monotonic() + (options.seconds or math.inf)

    def items(self) -> None:
        """What the options leave of the plan; stock comes before the items that are compared with it."""
        options, known = self._options, self.result["items"]
        how = ZooHow(
            short=options.short,
            log=options.log,
            precision=options.precision,
            environments=environments(self._found.platform),
            arguments=("--gdn-prefill-backend", "triton") if here.lacks_flashinfer(self._found.platform) else (),
        )
        runs = Runs(how, self._end)
        runners = [one for one in self._found.runners if one in (options.runners or self._found.runners)]
        whole = plan(options.families, runners, self._found.platform != "cpu", options.short)
        for _, group in itertools.groupby(whole, key=lambda item: (item.runner, bool(item.components))):
            items = list(group)
            wanted = [
                one for one in items if not options.components or WORDS.get(one.what, one.what) in options.components
            ]
            self._go({item.name: partial(runs.run, item) for item in wanted}, options.jobs)
            runs.stocks |= {
                item.setting: known[item.name] for item in items if not item.components and item.name in known
            }

    def benchmarks(self) -> None:
        """Those that were asked for; without a word all that say something of a GPU, but none in the short form."""
        names = self._options.benchmarks
        if names is None:
            names = [] if self._options.short else [name for name, one in BENCHMARKS.items() if not one.not_on_gpu]
        self._go({f"benchmark {name}": partial(benchmark, name, self._end) for name in names})

    def _go(self, tasks: Mapping[str, Callable[[], Outcome]], jobs: int = 1) -> None:
        """Run tasks by name: a line for each, and the file is written after each."""
        ran, known = self.ran, self.result["items"]
        if self._options.seconds:
            ran |= {name: known[name] for name in tasks if known.get(name, {}).get("commit") == commit()}

        def run(name: str) -> Outcome:
            start = time.monotonic()
            outcome = {what: value for what, value in tasks[name]().items() if what not in MORE}
            print(f"{name}: {outcome['state']}: {outcome['reason']} ({time.monotonic() - start:.0f} s)", flush=True)
            return {**outcome, "commit": commit()}

        with ThreadPoolExecutor(jobs) as pool:
            for name, running in [(name, pool.submit(run, name)) for name in tasks if name not in ran]:
                try:
                    ran[name] = known[name] = running.result()
                except OutOfTime:
                    self.not_reached.append(name)
                    continue
                results.save(self._path, self.result)


def benchmark(name: str, end: float) -> Outcome:
    """Run a benchmark in its short form, every component on: its state and reason, and its result where there is one.

    `end` is a time of time.monotonic(). Raises: OutOfTime after it.
    """
    from benchmarks import bench

    if (left_s := end - time.monotonic()) <= 0:
        raise OutOfTime
    environ = {f"BENCH_MMCACHE_{component.upper()}": "1" for component in ENGINE_COMPONENTS} | {
        "VLLM_PLUGINS": "mmcache"
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = bench.run(name, Path(folder), environ, min(left_s, BENCHMARK_S))
        except (bench.Failed, TimeoutError) as error:
            if isinstance(error, TimeoutError) and left_s < BENCHMARK_S:
                raise OutOfTime from None
            return {"state": "failed", "reason": " ".join(str(error).split())[-300:]}
    return {"state": "passed", "reason": "ran to its end", "result": result}


def environments(platform: str) -> dict[str, dict[str, str]]:
    """What the model runners need on a platform: on the CPU the second has Triton's interpreter, as in tests."""
    if here.lacks_flashinfer(platform):
        return {runner: {"VLLM_USE_FLASHINFER_SAMPLER": "0"} for runner in ("V1", "V2")}
    if platform != "cpu":
        return {}
    from tests.support.engine_configuration import CONFIGURATIONS

    names = {"V1": "v1", "V2": "v2-async"}
    return {runner: {"TEST_ENGINE": one, **CONFIGURATIONS[one].environment()} for runner, one in names.items()}


def left_out(found: here.Found) -> dict[str, str]:
    """What no run of this command checks here, and why."""
    left = {
        "lazy_media, image_extraction, identity, lazy_processing": (
            "in the API server, without a CUDA part; `make test` has them"
        ),
        "more than one GPU": "every engine here has one",
    }
    if found.platform == "cpu":
        left["compiled"] = "--platform cpu runs eagerly"
        left["Triton's compiler"] = "model runner V2 runs in Triton's interpreter here"
    if here.lacks_flashinfer(found.platform):
        left["FlashInfer"] = "it is not there: vLLM's own sampler and Triton's GDN kernels ran in its place"
    if "V2" not in found.runners:
        left["model runner V2"] = here.why_no_v2(found.platform)
    return left | {f"benchmark {name}": one.not_on_gpu for name, one in BENCHMARKS.items() if one.not_on_gpu}


def exit_code(ran: Mapping[str, Outcome]) -> int:
    """0 where something was checked and none of it failed; stock's own failures are shown, not counted."""
    states = [outcome["state"] for name, outcome in ran.items() if ", stock vLLM, " not in name]
    return 1 if "failed" in states else 0 if "passed" in states else 2


if __name__ == "__main__":
    sys.exit(main())
