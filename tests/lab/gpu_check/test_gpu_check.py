# SPDX-License-Identifier: Apache-2.0
"""`make gpu-check` on the CPU engine: the same way through the code, and what makes it fail.

There is no GPU in CI; what is CUDA's own is not tested here.
"""

import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from mmcache_tools.prove_zoo.items import plan
from mmcache_tools.zoo import FIRST_FAMILIES, architecture_of

from benchmarks import summary
from benchmarks.catalogue import BENCHMARKS
from benchmarks.results import committed
from scripts import matrix
from scripts.gpu_check import found, results, run
from tests.support.sizes import larger
from vllm_mmcache.base import settings
from vllm_mmcache.base.status import ON, State
from vllm_mmcache.lifecycle import tested_engines
from vllm_mmcache.lifecycle.activation import predict
from vllm_mmcache.metrics import transport
from vllm_mmcache.prove import items

PASSED = {"state": "passed", "reason": "4 checks", "engine": {"async_scheduling": True}}
FAILED = {"state": "failed", "reason": "same_again: log-probabilities differ"}
NOT_CHECKED = {"state": "not checked", "reason": "control: spoiled KV: not shown", "engine": {}}
NO_ENGINE = items.unrunnable({"state": "not checked", "reason": "no kernel"})


def env(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("MMCACHE_")} | more


@larger
@pytest.mark.engine
@pytest.mark.parametrize("runner", ["V2", "V1"])
def test_the_command_on_the_cpu(runner: str, tmp_path: Path) -> None:
    """One family, all components, in processes of its own; also a component whose variable the user has set to off.

    V2 is the engine that users run, with async scheduling, but through Triton's interpreter.
    """
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "scripts.gpu_check.run", "--platform", "cpu", "--families", "qwen3-vl"]
    command += ["--runners", runner, "--short", "--results", str(path)]
    done = subprocess.run(command, cwd=found.REPO, env=env(MMCACHE_FEATURES="0"), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert (result["platform"], list(result["items"])) == ("cpu", [f"qwen3-vl, all components, {runner}, eager"])
    (item,) = result["items"].values()
    assert item["state"] == "passed", item
    assert item["engine"]["model_runner"].startswith(f"vllm.v1.worker.cpu{'.' if runner == 'V2' else '_'}")
    assert item["engine"]["async_scheduling"] == (runner == "V2")
    states = {name: check["state"] for name, check in item["checks"].items()}
    assert {states[f"{component} is on"] for component in tested_engines.ENGINE_COMPONENTS} == {"passed"}
    for name in (
        "swapped_image",
        "use of features",
        "use of block_keys",
        "use of metrics",
        "engine",
        "control: other image",
        "control: spoiled KV",
    ):
        assert states[name] == "passed"
    assert states["use of image_spans"] == "not checked"
    assert f"| qwen3-vl | all components | {runner} | eager | passed |" in done.stdout
    assert "- more than one GPU: every engine here has one" in done.stdout


@pytest.mark.process
def test_without_a_gpu_it_says_what_it_saw(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vLLM is not for the CPU")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"))
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert run.main() == 2
    said = capsys.readouterr().err
    assert "runs on 'cpu' here, not on 'cuda'; nvidia-smi" in said
    assert "make gpu-check VLLM_PYTHON=" in said


@pytest.mark.process
def test_an_interpreter_without_vllm(tmp_path: Path) -> None:
    """-S: no site-packages, so the standard library must do to say what is missing."""
    command = [sys.executable, "-S", "-m", "scripts.gpu_check.run"]
    done = subprocess.run(command, cwd=found.REPO, env=env(PYTHONPATH=""), capture_output=True, text=True)
    assert (done.returncode, "has no vLLM. Name one that has it" in done.stderr) == (2, True), done.stderr


@pytest.mark.process
def test_the_checkout_is_a_plugin_and_nothing_is_installed(tmp_path: Path) -> None:
    """vLLM would find one entry point, that of the folder, also where a vllm-mmcache is installed."""
    path = found.make_plugin_path(tmp_path / "plugin")
    code = (
        "from importlib.metadata import entry_points\n"
        "found = [one for one in entry_points(group='vllm.general_plugins') if one.name == 'mmcache']\n"
        "print(len(found), found[0].dist.locate_file(''), found[0].load().__module__)\n"
        "import vllm_mmcache; print(vllm_mmcache.__file__)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=env(PYTHONPATH=path), capture_output=True, text=True)
    assert done.stdout.split() == [
        "1",
        str(tmp_path / "plugin"),
        "vllm_mmcache.plugin",
        str(found.REPO / "vllm_mmcache" / "__init__.py"),
    ], done.stderr


@pytest.mark.engine
@pytest.mark.parametrize("config", [EngineConfig("qwen3-vl")], ids=["qwen3-vl"])
def test_what_makes_a_check_fail(pool: EnginePool, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits on other KV, a component that is off, one that should be, one that is not used, blind controls."""
    from mmcache_tools.prove_zoo import checks as zoo_checks

    from tests.support.towers import features_by_image
    from vllm_mmcache.base import status
    from vllm_mmcache.exactness.conversations import filler, one, picture, user
    from vllm_mmcache.prove import checks, workers

    rig = pool.get(config)

    def spoiled(rig: ZooRig) -> Any:
        ask = user(filler(100), picture(60), "What is in this picture?")
        one(rig, ask)
        for tensor in rig.kv_tensors():
            tensor.mul_(-2)
        return [one(rig, ask)]

    monkeypatch.setattr(zoo_checks, "SHORT", (spoiled,))
    rows = {row.check: row for row in zoo_checks.rows_of(rig, tested_engines.ENGINE_COMPONENTS, short=True)}
    assert [name for name, row in rows.items() if row.state == "failed"] == ["spoiled"]
    assert rows["spoiled"].inexact
    said = {"engine": {}, "rows": [asdict(row) for row in rows.values()]}
    item = items.Item("qwen3-vl", tested_engines.ENGINE_COMPONENTS, "V1")
    outcome = items.judge(item, said, None)
    assert (outcome["state"], outcome["reason"].partition(" ")[0]) == ("failed", "spoiled:")
    assert run.exit_code({item.name: outcome}) == 1

    row = checks.row_of("engine", lambda: zoo_checks.assert_engine(rig, "V2"))
    assert (row.state, "not V2: vllm.v1.worker.cpu_model_runner" in row.reason) == ("failed", True), row
    with monkeypatch.context() as patch:
        patch.setattr(zoo_checks, "schedules_ahead", lambda rig: False)
        patch.setattr(type(rig.llm.llm_engine.vllm_config), "use_v2_model_runner", True)
        patch.setattr(type(rig.runner), "__module__", "vllm.v1.worker.gpu.model_runner")
        row = checks.row_of("engine", lambda: zoo_checks.assert_engine(rig, "V2"))
    assert (row.state, "without async scheduling" in row.reason) == ("failed", True), row
    with monkeypatch.context() as patch:
        for place in ("engine 0", "worker 0 of engine 0"):
            patch.setitem(status._places[place], "features", State("off", "a test"))
        row = checks.row_of("on", lambda: checks.assert_on(rig, "features"))
        assert (row.state, row.reason) == ("not checked", "off here: a test"), row
        patch.setitem(status._places["worker 0 of engine 0"], "metrics", State("off", "a test"))
        row = checks.row_of("on", lambda: checks.assert_on(rig, "metrics"))
    assert (row.state, "on in api, engine 0; off: a test" in row.reason) == ("failed", True), row
    with monkeypatch.context() as patch:
        patch.setattr(transport, "count", lambda name, amount: None)
        row = checks.row_of("use", lambda: checks.use_metrics(rig))
    assert (row.state, "grew by 0" in row.reason) == ("failed", True), row
    row = checks.row_of("off", lambda: checks.assert_off({"features"}))
    assert (row.state, row.reason) == ("failed", "AssertionError: features should be off")
    with monkeypatch.context() as patch:
        patch.setattr(status, "_places", {})
        row = checks.row_of("on", lambda: checks.assert_on(rig, "block_keys"))
    assert (row.state, "is the plugin loaded?" in row.reason) == ("failed", True)
    with monkeypatch.context() as patch:  # the tower runs again where nothing is kept
        patch.setattr(rig.features.store, "reserve", lambda *given: None)
        row = checks.row_of("use", lambda: checks.use_features(rig))
    assert (row.state, "runs of the vision tower: [1, 1]" in row.reason) == ("failed", True), row
    assert not features_by_image(rig)
    with monkeypatch.context() as patch:
        patch.setattr(workers, "spoil_kv", lambda worker: 1)
        row = checks.row_of("control", lambda: checks.assert_spoiled_kv_is_seen(rig))
    assert (row.state, "was judged right" in row.reason) == ("failed", True)


def test_stock_is_not_counted_and_excuses_a_component_alone() -> None:
    """An answer that stock gets wrong in the same check is no component's fault, but for all components together."""
    stock = {**FAILED, "engine": {}, "checks": {"same_again": {"state": "failed", "reason": "differ by 2"}}}
    wrong = {"check": "same_again", "state": "failed", "reason": "differ by 2", "inexact": True}
    right = {"check": "text_only", "state": "passed", "reason": "", "inexact": False}
    said = {"engine": {}, "rows": [wrong, right]}
    alone = items.Item("gemma3", ("block_keys",), "V1")
    assert items.judge(alone, said, stock)["checks"]["same_again"]["state"] == "not checked"
    assert items.judge(alone, said, stock)["state"] == "passed"
    assert items.judge(alone, {**said, "rows": [wrong | {"inexact": False}]}, stock)["state"] == "failed"
    assert items.judge(alone, said, None)["state"] == "failed"
    unseen = {"rows": [wrong | {"check": "control: other image"}, right], "engine": {}}
    broken = {**stock, "checks": {"control: other image": {"state": "failed", "reason": "differ by 3"}}}
    assert items.judge(alone, unseen, broken)["state"] == "not checked", "a pass without its controls"
    use = {"rows": [wrong | {"check": "use of block_keys"}, right], "engine": {}}
    assert items.judge(alone, use, stock)["state"] == "passed"
    assert items.judge(alone, use, {**stock, "checks": {"same_again": {"state": "passed"}}})["state"] == "failed"
    assert items.judge(items.Item("gemma3", tested_engines.ENGINE_COMPONENTS, "V1"), said, stock)["state"] == "failed"
    idle = {"check": "block_keys is on", "state": "not checked", "reason": "not for this runner", "inexact": False}
    outcome = items.judge(alone, {**said, "rows": [idle, right]}, None)
    assert (outcome["state"], "not for this runner" in outcome["reason"]) == ("not checked", True)
    assert run.exit_code({items.Item("gemma3", (), "V1").name: FAILED, alone.name: PASSED}) == 0
    assert run.exit_code({alone.name: PASSED, "benchmark gallery": FAILED}) == 1
    assert run.exit_code({alone.name: {"state": "not checked", "reason": "no engine"}}) == 2


def result_of(platform: str) -> dict[str, Any]:
    """A result in which everything passed."""
    whole = plan(tuple(FIRST_FAMILIES), ("V1", "V2"), platform != "cpu", short=False)
    return {
        "platform": platform,
        "vllm": "0.33.0",
        "runners": ["V1", "V2"],
        "items": {item.name: dict(PASSED) for item in whole},
    }


def test_what_a_result_proves() -> None:
    result = result_of("cuda")
    everything = dict.fromkeys(tested_engines.ENGINE_COMPONENTS, tuple(FIRST_FAMILIES))

    def without(*components: str) -> dict[str, tuple[str, ...]]:
        return {component: families for component, families in everything.items() if component not in components}

    assert results.components_proven(result, "V1") == results.components_proven(result, "V2") == everything
    for state in (FAILED, NOT_CHECKED):  # on one runner; the other's proof stays, and does not stand in
        result["items"]["gemma3, image_spans, V2, eager"] = dict(state)
        assert results.components_proven(result, "V2") == without("image_spans")
        assert results.components_proven(result, "V1") == everything
    result["items"]["qwen3-vl, stock vLLM, V1, eager"] = dict(FAILED)
    assert results.components_proven(result, "V1") == everything, "stock is not counted"
    result["items"]["qwen2-vl, features, V2, eager"] = dict(NO_ENGINE)
    assert results.components_proven(result, "V2") == without("image_spans"), "nobody can run that"
    del result["items"]["qwen3-vl, features, V2, eager"]
    others = tuple(family for family in FIRST_FAMILIES if family != "qwen3-vl")
    assert results.components_proven(result, "V2") == without("image_spans") | {"features": others}
    result["items"]["qwen3.5, features, V2, eager"] = dict(FAILED)
    assert results.components_proven(result, "V2") == without("image_spans", "features"), "not for the others, either"
    del result["items"]["qwen3.5, all components, V2, compiled"]
    others = tuple(family for family in FIRST_FAMILIES if family != "qwen3.5")
    assert results.components_proven(result, "V2") == dict.fromkeys(
        without("image_spans", "features", "inner_checkpoints"), others
    ), "of the family that was not run whole, nothing; and what no other family uses, for none"
    result["items"]["qwen3.5, all components, V2, compiled"] = dict(FAILED)
    assert results.components_proven(result, "V2") == {}

    result = result_of("cuda")
    for family in FIRST_FAMILIES:
        result["items"][f"{family}, all components, V2, compiled"] = dict(NO_ENGINE)
    assert results.components_proven(result, "V2") == {}, "never compiled"
    assert results.components_proven(result, "V1") == everything


def test_recording_switches_components_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "tested_engines.json"
    table.write_text(tested_engines.FILE.read_text())
    monkeypatch.setattr(tested_engines, "FILE", table)
    path = found.REPO / "scripts" / "gpu_check" / "results" / "some-gpu.json"
    before = tested_engines.rows()
    result = result_of("cuda")
    result["items"]["gemma3, image_spans, V2, eager"] = dict(NOT_CHECKED)
    results.record(result, path)
    written = [row for row in tested_engines.rows() if row not in before]
    assert {(row.architectures, row.num_devices) for row in written} == {((), 1)}
    assert [(row.engine, row.components) for row in written] == [
        (tested_engines.Engine("0.33", "cuda", 1, "async"), tested_engines.ENGINE_COMPONENTS),
        (
            tested_engines.Engine("0.33", "cuda", 2, "async"),
            tuple(r for r in tested_engines.ENGINE_COMPONENTS if r != "image_spans"),
        ),
    ]
    del result["items"]["qwen3.5, all components, V2, compiled"]
    results.record(result, path)
    (row,) = [row for row in tested_engines.rows() if row.evidence.endswith("some-gpu.json") and row.engine.runner == 2]
    assert set(row.architectures) == {architecture_of(one) for one in FIRST_FAMILIES if one != "qwen3.5"}
    result["items"]["gemma3, block_keys, V2, eager"]["engine"] = {"async_scheduling": False}
    with pytest.raises(ValueError, match="V2 has items with async and sync scheduling"):
        results.record(result, path)
    for runner in ("V1", "V2"):
        result["items"][f"gemma3, all components, {runner}, eager"] = dict(FAILED)
    results.record(result, path)
    assert tested_engines.rows() == before


def test_the_benchmarks_table_is_the_pages() -> None:
    """Made from the same results, its rows are those of benchmarks/README.md."""
    names = ("block_keys", "gallery", "agents")
    table = summary.table({name: committed(name) for name in names}).splitlines()
    rows = [line for line in table if line.startswith("| ")][1:]
    page = (found.REPO / "benchmarks" / "README.md").read_text().splitlines()
    assert rows == [row for row in page if row in rows]
    commands = {row.rpartition("`make ")[2].removesuffix("` |") for row in rows}
    assert commands == {"bench-block-keys", "bench-features", "bench-agents"}
    chosen = {name for name, one in BENCHMARKS.items() if not one.not_on_gpu}
    assert chosen == {
        "block_keys",
        "image_questions",
        "cold_requests",
        "agents",
        "computer_use",
        "image_service",
        "gallery",
    }


def test_a_benchmark_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import bench

    def failing(name: str, output: Path, environ: Any, timeout_s: float) -> Any:
        assert environ["BENCH_MMCACHE_FEATURES"] == "1"
        raise (bench.Failed("with status 1:\n    no memory") if name == "agents" else TimeoutError("too long"))

    monkeypatch.setattr(bench, "run", failing)
    assert run.benchmark("agents", math.inf) == {"state": "failed", "reason": "with status 1: no memory"}
    assert run.benchmark("gallery", math.inf) == {"state": "failed", "reason": "too long"}
    with pytest.raises(items.OutOfTime):
        run.benchmark("gallery", time.monotonic() + 5)


@pytest.mark.parametrize("row", tested_engines.rows(), ids=lambda row: f"{row.engine}")
def test_every_row_has_its_evidence(row: tested_engines.Row) -> None:
    """A component is on by default only where the tests run, or where a committed result says that it passed."""
    assert set(row.components) <= set(tested_engines.ENGINE_COMPONENTS)
    assert None not in astuple(row.engine)
    assert (row.num_devices == 1) == (row.engine.platform == "cuda"), "no check has more than one GPU"
    if row.evidence == "make test":
        assert (row.engine.platform, row.engine.vllm) == ("cpu", "0.32"), "CI has no other"
        return
    if row.evidence == "docs/matrix.json":
        engines: dict[Any, str] = {(1, "sync"): "v1", (2, "async"): "v2-async"}
        engine = engines[row.engine.runner, row.engine.scheduling]
        assert row.engine.platform == "cpu"
        assert matrix.proves(row.components, row.engine.vllm, engine, matrix.read())
        return
    result = json.loads((found.REPO / row.evidence).read_text())
    runner = f"V{row.engine.runner}"
    assert results.engine_of(result, runner) == row.engine
    proven = results.components_proven(result, runner)
    for component in row.components:
        whole = tuple(map(architecture_of, FIRST_FAMILIES))
        assert set(row.architectures or whole) <= set(map(architecture_of, proven[component]))


def test_doctor_on_a_platform_without_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's components are off and say how to switch them on; those of the API server are on."""
    monkeypatch.setattr(tested_engines, "TABLE", [])
    monkeypatch.setattr(settings, "_current", settings.Settings())
    states = predict()
    for component in tested_engines.ENGINE_COMPONENTS:
        said = rf"off: not yet proven on vLLM .*, cpu: .*, MMCACHE_{component.upper()}=1 switches it on"
        assert re.fullmatch(said, str(states[component]))
    assert {states[component] for component in ("lazy_media", "image_extraction", "identity", "lazy_processing")} == {
        ON
    }
