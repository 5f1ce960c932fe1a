# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs at start: each second belongs to one thing, and what stock does too is not counted."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

from benchmarks.probe.sitecustomize import FUNCTIONS, VLLM
from benchmarks.results import ROOT
from benchmarks.start_cost import NAMES, PROBE, own_cpu_s, reports
from tests.support.sizes import larger


class Clock:
    """CPU seconds of a thread, spent by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def thread_time(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def probe(clock: Clock) -> ModuleType:
    """The probe as a module of this process; without its variable it changes nothing here."""
    spec = importlib.util.spec_from_file_location("start_cost_probe", PROBE / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["spans"] = module.Spans(clock.thread_time)
    return module


def test_each_second_belongs_to_one_span(probe: ModuleType, clock: Clock) -> None:
    clock.now += 100  # before everything: nobody's
    with probe.spans.of("outer"):
        clock.now += 1
        with probe.spans.of("inner"):
            clock.now += 10
        clock.now += 2
    clock.now += 100
    with probe.spans.of("inner"):
        clock.now += 20
    assert probe.spans.spent == {"outer": 3, "inner": 30}


def test_what_a_wrapper_wraps_is_not_the_plugins(probe: ModuleType, clock: Clock) -> None:
    def of_vllm(seconds: float) -> str:
        clock.now += seconds
        return "answer"

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        clock.now += 1
        return wrapped(*args, **kwargs)

    assert probe.timed(wrapper)(of_vllm, None, (50,), {}) == "answer"
    assert probe.spans.spent == {FUNCTIONS: 1, VLLM: 50}

    def plain(wrapped: Any) -> Any:
        return wrapped(5)

    assert probe.timed(plain)(of_vllm) == "answer"
    assert probe.spans.spent == {FUNCTIONS: 6, VLLM: 50}, "what the plugin calls by itself is its own"


def asked(worker: str) -> str:
    return f"asked {worker}"


def test_a_measured_function_travels_as_itself(probe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name: where it arrives, it is measured there or not."""
    timed = probe.timed(asked)
    monkeypatch.setattr(sys.modules[__name__], "asked", timed)
    assert b"spans" not in (travels := cloudpickle.dumps(timed))
    assert cloudpickle.loads(travels)("rank 0") == "asked rank 0"


def test_what_stock_imports_too_is_not_counted() -> None:
    cost = {"vllm.early": 0.5, "vllm.extra": 0.25, "vllm.deep": 0.125, "vllm_mmcache.plugin": 1.0, FUNCTIONS: 2.0}
    ours = {"cpu_s": cost | {VLLM: 100.0}}
    assert own_cpu_s({"cpu_s": {"vllm.early": 0.5, "vllm_mmcache.plugin": 1.0}}, ours) == 2.0 + 1.0 + 0.375
    assert own_cpu_s({"cpu_s": {}}, ours) == 3.875, "a stock that has imported nothing"


def test_reports_are_told_apart_and_those_of_another_plugin_refused(tmp_path: Path) -> None:
    ours = str(tmp_path / "vllm_mmcache" / "__init__.py")
    names = {1: "MainProcess", 2: "MainProcess", 3: "EngineCore", 4: "VllmWorker-0", 5: "a helper"}
    for pid, name in names.items():
        (tmp_path / f"{pid}.json").write_text(json.dumps({"name": name, "plugin": ours if pid != 5 else None}))
    cpu_s = {pid: float(pid) for pid in names}
    found = reports(tmp_path, 1, cpu_s, tmp_path)
    assert {process: report["whole_cpu_s"] for process, report in found.items()} == {
        "api_server": 1, "engine": 3, "worker": 4
    }, "not the resource tracker"  # fmt: skip
    for elsewhere in ("/installed/vllm_mmcache/__init__.py", None):
        (tmp_path / "4.json").write_text(json.dumps({"name": "VllmWorker-0", "plugin": elsewhere}))
        with pytest.raises(RuntimeError, match="expected the plugin of"):
            reports(tmp_path, 1, cpu_s, tmp_path)


PLUGIN = "from vllm_mmcache.lifecycle import activation\n\ndef register():\n    activation.start()\n"
COMPONENT = "def wrap(wrapped, instance, args, kwargs):\n    return wrapped()\n\ndef other():\n    pass\n"
START = """def start():
    import colorsys
    from vllm_mmcache import component
    component.wrap(component.other, None, (), {})
"""
PROGRAM = """
import os, time
from vllm_mmcache.plugin import register
register()
open(os.environ["START_COST_FOLDER"] + "/ready", "w").close()
while not os.path.exists(f"{os.environ['START_COST_FOLDER']}/{os.getpid()}.json"):
    time.sleep(0.01)
"""


@pytest.mark.process
def test_the_probe_in_a_process_of_its_own(tmp_path: Path) -> None:
    package, folder = tmp_path / "vllm_mmcache", tmp_path / "folder"
    (package / "lifecycle").mkdir(parents=True)
    folder.mkdir()
    for name, text in {"": "", "lifecycle/": ""}.items():
        (package / f"{name}__init__.py").write_text(text)
    (package / "plugin.py").write_text(PLUGIN)
    (package / "lifecycle" / "activation.py").write_text(START)
    (package / "component.py").write_text(COMPONENT)
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(PROBE), str(tmp_path)]),
        "START_COST_FOLDER": str(folder),
    }
    subprocess.run([sys.executable, "-c", PROGRAM], env=environ, check=True, timeout=300, cwd=tmp_path)
    (found,) = (json.loads(path.read_text()) for path in folder.glob("*.json"))
    assert {"vllm_mmcache.plugin", "vllm_mmcache.lifecycle", "colorsys"} <= set(found["cpu_s"])
    assert {label for label in found["cpu_s"] if " " in label} == {FUNCTIONS}
    assert found["cpu_s"][VLLM] > 0
    assert found["cpu_s"][FUNCTIONS] > 0
    assert all(found["cpu_s"][module] > 0 for module in ("colorsys", "vllm_mmcache.plugin"))


@larger
@pytest.mark.engine
def test_a_pair_of_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.run", "start_cost", "--short", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "start_cost.json").read_text())
    for process in NAMES.values():
        found = content["found"][process]
        ours = {what: sides["mmcache"] for what, sides in found.items() if "mmcache" in sides}
        assert found["cpu_s"]["stock"] > 1, "not a process that has imported vLLM"
        assert 0.001 < ours["plugin_own_cpu_s"] < ours["cpu_s"], "the plugin is not in this process, or all of it"
