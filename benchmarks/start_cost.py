# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs at start: CPU seconds of API server, engine and worker until the server is healthy.

Stock and plugin start in turn, a real server with the engine and one worker in processes of their own. A whole process
takes 10 s with a spread of a second, so the plugin's own part is measured directly, too (probe/sitecustomize.py): its
functions and components that run at start, its modules, and the modules that a stock process has not imported by then.

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

import psutil
from mmcache_tools.harness.server import CPU_ARGS, CPU_ENV, Server, free_port, living, stop, wait_until_healthy
from mmcache_tools.zoo import build_cached

from benchmarks.probe.sitecustomize import PLUGIN, VLLM
from benchmarks.processes import cpu_s
from benchmarks.results import ROOT, SIDES, Result, commit

PROBE = Path(__file__).parent / "probe"
NAMES = {"MainProcess": "api_server", "EngineCore": "engine", "VllmWorker-0": "worker"}  # as vLLM names processes
ARGS = (*CPU_ARGS, "--distributed-executor-backend", "mp")
TIMEOUT_S = 300.0

Process = dict[str, Any]


def measure(options: Namespace) -> Result:
    """Medians of each process over the pairs of starts."""
    result, plugin = Result(), Path(options.plugin or ROOT).resolve()
    compileall.compile_dir(plugin / PLUGIN, quiet=2)  # so that the first start is like the others
    pairs: list[dict[str, dict[str, Process]]] = []
    with tempfile.TemporaryDirectory() as root:
        model = build_cached("qwen3-vl", Path(root))
        for number in range(options.pairs):
            pairs.append({side: start(side, plugin, model) for side in SIDES[:: -1 if number % 2 else 1]})
    result.details["plugin_commit"] = commit(plugin)
    for process in NAMES.values():
        whole = {side: median(pair[side][process]["whole_cpu_s"] for pair in pairs) for side in SIDES}
        result.add(process, "cpu_s", whole)
        own = median(own_cpu_s(pair["stock"][process], pair["mmcache"][process]) for pair in pairs)
        result.add(process, "plugin_own_cpu_s", {"mmcache": own})
    return result


def start(side: str, plugin: Path, model: Path) -> dict[str, Process]:
    """By process: CPU seconds until the server is healthy, and what imports and the plugin's functions took.

    `plugin` is a checkout, absolute. Raises: EnvironmentProblem where the server does not start; TimeoutError where a
    process does not report; RuntimeError where it has another plugin.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), str(free_port())
        environ = {k: v for k, v in os.environ.items() if not k.startswith("MMCACHE_")}
        environ |= {k.removeprefix("BENCH_"): v for k, v in environ.items() if k.startswith("BENCH_MMCACHE_")}
        environ |= {**CPU_ENV, "PYTHONPATH": f"{PROBE}{os.pathsep}{plugin}", "START_COST_FOLDER": str(folder)}
        environ |= {"MMCACHE_DISABLE": "1"} if side == "stock" else {}
        command = [sys.executable, str(PROBE / "vllm_main.py"), "serve", str(model), "--host", "127.0.0.1"]
        log_path = model.with_name(f"{model.name}.start.{side}.log")
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*command, "--port", port, *ARGS], stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=environ, cwd=folder, start_new_session=True,
            )  # fmt: skip
        try:
            wait_until_healthy(Server(f"http://127.0.0.1:{port}", log_path, process), TIMEOUT_S)
            whole_cpu_s = {pid: cpu_s(psutil.Process(pid)) for pid in living(process.pid)}
            (folder / "ready").touch()
            return reports(folder, process.pid, whole_cpu_s, plugin)
        finally:
            stop(process)


def reports(folder: Path, leader: int, whole_cpu_s: dict[int, float], plugin: Path) -> dict[str, Process]:
    """What the probes have written, as soon as all processes have; a helper of multiprocessing is none of them."""
    deadline = time.monotonic() + TIMEOUT_S
    found: dict[str, Process] = {}
    while set(found) != set(NAMES.values()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"reports of {', '.join(found) or 'no process'}, expected {', '.join(NAMES.values())}")
        time.sleep(0.1)
        for path in folder.glob("*.json"):
            report, pid = json.loads(path.read_text()), int(path.stem)
            if report["name"] in NAMES and (report["name"] != "MainProcess" or pid == leader):
                found[NAMES[report["name"]]] = {**report, "whole_cpu_s": whole_cpu_s[pid]}
    for report in found.values():
        if report["plugin"] != str(plugin / PLUGIN / "__init__.py"):
            raise RuntimeError(f"measured {report['plugin']}, expected the plugin of {plugin}")
    return found


def own_cpu_s(stock: Process, ours: Process) -> float:
    """The plugin's in one process: its functions, its modules, and the modules that stock has not imported."""
    theirs = {name for name in stock["cpu_s"] if not name.startswith(PLUGIN)} | {VLLM}
    return float(sum(seconds for name, seconds in ours["cpu_s"].items() if name not in theirs))
