# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs at start: CPU seconds of API server, engine and worker until the server is healthy.

Stock and plugin start in turn, a real server with the engine and one worker in processes of their own. A whole process
takes 10 s with a spread of a second, so the plugin's own part is measured directly, too (probe/sitecustomize.py): its
functions and rooms that run at start, its modules, and the modules that a stock process has not imported by then.

--plugin measures another checkout. Target: at most 0.5 s of the plugin's own in each process.
"""

import compileall
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import commit
from benchmarks.processes import process_cpu_s
from benchmarks.results import ROOT, Result
from benchmarks.sides import SIDES
from vllm_mmcache.demo.server import CPU_ARGS, CPU_ENV, Server, free_port, living, stop, wait_until_healthy
from vllm_mmcache.zoo import build_cached

PROBE = Path(__file__).parent / "probe"
PROCESSES = ("api_server", "engine", "worker")
ARGS = (*CPU_ARGS, "--distributed-executor-backend", "mp")
TIMEOUT_S = 300.0
PLUGIN = "vllm_mmcache"
FUNCTIONS, ROOMS, VLLM = "functions of the plugin", "rooms of the plugin", "wrapped"  # as the probe names them
PARTS = ("functions_cpu_s", "rooms_cpu_s", "own_modules_cpu_s", "extra_modules_cpu_s", "own_modules", "extra_modules")
NUM_MOST = 15  # modules that are named in a result

Process = dict[str, Any]


def measure(options: Namespace) -> Result:
    """Medians of each process over the pairs of starts, with the range of what two starts differ by."""
    result = Result()
    plugin = Path(options.plugin or ROOT).resolve()
    compileall.compile_dir(plugin / PLUGIN, quiet=2)  # so that the first start is like the others
    pairs: list[dict[str, dict[str, Process]]] = []
    with tempfile.TemporaryDirectory() as root:
        model = build_cached("qwen3-vl", Path(root))
        for number in range(options.pairs):
            pairs.append({side: start(side, plugin, model) for side in SIDES[:: -1 if number % 2 else 1]})
            print(f"pair {number + 1} of {options.pairs}", flush=True)
    result.details["plugin_commit"] = commit(plugin)
    for process in PROCESSES:
        add(result, process, [{side: pair[side][process] for side in SIDES} for pair in pairs])
    return result


def add(result: Result, process: str, pairs: list[dict[str, Process]]) -> None:
    """The numbers of one process."""
    whole = {side: [pair[side]["whole_cpu_s"] for pair in pairs] for side in SIDES}
    rest = {side: [rest_cpu_s(pair[side]) for pair in pairs] for side in SIDES}
    costs = [own_costs(pair["stock"], pair["mmcache"]) for pair in pairs]
    result.add(process, "cpu_s", {side: median(seconds) for side, seconds in whole.items()})
    result.add(process, "cpu_beside_imports_s", {side: median(seconds) for side, seconds in rest.items()})
    for what in ("plugin_own_cpu_s", *PARTS):
        result.add(process, what, {"mmcache": median(cost[what] for cost in costs)})
    apart = [ours - stock for stock, ours in zip(*whole.values(), strict=True)]
    result.add(process, "difference_cpu_s", {"least": min(apart), "median": median(apart), "most": max(apart)})
    names = ("rooms_cost", "own_cost", "extra_cost", "extra_by_importer")
    result.details[process] = {"all": whole, **{part: most([cost[part] for cost in costs]) for part in names}}


def most(costs: list[dict[str, float]]) -> dict[str, float]:
    """Median CPU seconds of those that take most."""
    medians = {name: median(cost.get(name, 0.0) for cost in costs) for name in set().union(*costs)}
    return {name: round(medians[name], 4) for name in sorted(medians, key=lambda name: -medians[name])[:NUM_MOST]}


def environment(side: str, plugin: Path, folder: Path) -> dict[str, str]:
    """Of a server: the probe and the plugin's checkout first, no setting of the plugin but BENCH_MMCACHE_*."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MMCACHE_")}
    environ |= {k.removeprefix("BENCH_"): v for k, v in environ.items() if k.startswith("BENCH_MMCACHE_")}
    environ |= CPU_ENV | {"START_COST_FOLDER": str(folder), "PYTHONPATH": os.pathsep.join([str(PROBE), str(plugin)])}
    return environ | ({"MMCACHE_DISABLE": "1"} if side == "stock" else {})


def start(side: str, plugin: Path, model: Path) -> dict[str, Process]:
    """By process: CPU seconds until the server is healthy, modules and what they and the plugin's functions took.

    `plugin` is a checkout, absolute. Raises: EnvironmentProblem where the server does not start; TimeoutError where a
    process does not report; RuntimeError where it has another plugin.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        command = [sys.executable, str(PROBE / "vllm_main.py"), "serve", str(model), "--host", "127.0.0.1"]
        log_path = model.with_name(f"{model.name}.start.{side}.log")
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*command, "--port", str(port), *ARGS],
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=environment(side, plugin, folder), cwd=folder, start_new_session=True,
            )  # fmt: skip
        server = Server(f"http://127.0.0.1:{port}", log_path, process)
        try:
            wait_until_healthy(server, TIMEOUT_S)
            cpu_s = {pid: process_cpu_s(pid) for pid in living(process.pid)}
            (folder / "ready").touch()
            found = reports(folder, process.pid, cpu_s)
        finally:
            stop(process)
    refuse_another(found, plugin)
    return found


def refuse_another(found: dict[str, Process], plugin: Path) -> None:
    """Raises: RuntimeError where a process has the plugin from elsewhere, such as the installed one."""
    if elsewhere := {str(report["plugin"]) for report in found.values()} - {str(plugin / PLUGIN / "__init__.py")}:
        raise RuntimeError(f"measured {', '.join(sorted(elsewhere))}, expected the plugin of {plugin}")


def reports(folder: Path, leader: int, cpu_s: dict[int, float]) -> dict[str, Process]:
    """What the probes have written, as soon as all processes have."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        found: dict[str, Process] = {}
        for path in folder.glob("*.json"):
            report, pid = json.loads(path.read_text()), int(path.stem)
            if process := role(report["name"], pid == leader):
                found[process] = {**report, "whole_cpu_s": cpu_s[pid]}
        if set(found) == set(PROCESSES):
            return found
        time.sleep(0.1)
    raise TimeoutError(f"reports of {', '.join(found) or 'no process'}, expected {', '.join(PROCESSES)}")


def role(name: str, is_leader: bool) -> str:
    """One of PROCESSES by the name that vLLM gives a process; empty for a helper of multiprocessing."""
    if is_leader:
        return "api_server"
    return {"EngineCore": "engine", "VllmWorker-0": "worker"}.get(name, "")


def own_costs(stock: Process, ours: Process) -> Process:
    """The plugin's CPU seconds in one process: functions, rooms, its modules, and those that stock has not imported."""
    extra = sorted(set(ours["modules"]) - set(stock["modules"]))
    own = [module for module in ours["modules"] if is_own(module)]
    others = [module for module in extra if not is_own(module)]
    cost = ours["cpu_s"]
    parts = {
        "functions_cpu_s": cost.get(FUNCTIONS, 0.0),
        "rooms_cpu_s": sum(seconds for label, seconds in cost.items() if label.startswith(ROOMS)),
        "own_modules_cpu_s": sum(cost.get(module, 0.0) for module in own),
        "extra_modules_cpu_s": sum(cost.get(module, 0.0) for module in others),
    }
    by_importer: dict[str, float] = {}
    for module in others:
        at = first_cause(module, ours["importer"], set(others))
        by_importer[at] = by_importer.get(at, 0.0) + cost.get(module, 0.0)
    return {
        **parts,
        "plugin_own_cpu_s": sum(parts.values()),
        "own_modules": len(own),
        "extra_modules": len(others),
        "own_cost": {module: cost.get(module, 0.0) for module in own},
        "rooms_cost": {label: seconds for label, seconds in cost.items() if label.startswith(ROOMS)},
        "extra_cost": {module: cost.get(module, 0.0) for module in others},
        "extra_by_importer": by_importer,
    }


def rest_cpu_s(process: Process) -> float:
    """What a process took beside imports and the plugin's functions; two starts differ less in it than in the whole."""
    return float(process["whole_cpu_s"]) - sum(seconds for label, seconds in process["cpu_s"].items() if label != VLLM)


def is_own(module: str) -> bool:
    return module.partition(".")[0] == PLUGIN


def first_cause(module: str, importer: dict[str, str], extra: set[str]) -> str:
    """What imported the first of the chain of extra modules that ends with this: `importer > first`."""
    while (above := importer.get(module, "")) in extra:
        module = above
    return f"{above or 'vLLM'} > {module}"
