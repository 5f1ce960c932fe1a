# SPDX-License-Identifier: Apache-2.0
"""The order of the items, several at a time, and a time that is too short: the next call goes on."""

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.prove_zoo.items import SWITCH, ZooHow, plan

from scripts.gpu_check import found, run
from vllm_mmcache.base.errors import EnvironmentProblem
from vllm_mmcache.lifecycle import tested_engines
from vllm_mmcache.lifecycle.tested_engines import platform_name
from vllm_mmcache.prove import items
from vllm_mmcache.prove.arguments import given

FOUND = found.Found("some GPU", "cuda", "0.33.0", "2.14.0", "3.12", ("V2", "V1"))
OPTIONS: dict[str, Any] = {
    "families": ["gemma3", "qwen3-vl"],
    "components": None,
    "runners": None,
    "precision": None,
    "short": False,
    "log": None,
    "jobs": 3,
    "seconds": 60.0,
}


def how(platform: str) -> ZooHow:
    return ZooHow(short=True, environments=run.environments(platform))


@pytest.mark.process
def test_the_order_and_going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runner V2 first, of each runner stock before all else; what time was too short for is run by the next call."""
    started: list[items.Item] = []
    stop_at = "gemma3, all components, V2, compiled"

    def put(item: items.Item, how: ZooHow, stock: Any, left_s: float) -> dict[str, Any]:
        if item.name == stop_at or (started and started[-1].runner == "V1" and stop_at):
            raise items.OutOfTime
        started.append(item)
        assert (stock is None) == (not item.components), "each is compared with stock, also with an earlier call's"
        return {"state": "passed", "reason": item.name, "engine": {}, "checks": {}}

    monkeypatch.setattr(items, "run", put)
    options = argparse.Namespace(**OPTIONS)
    whole = plan(options.families, FOUND.runners, compiled=True, short=False)

    def call() -> tuple[dict[str, Any], list[str]]:
        started.clear()
        one = run.Run(FOUND, options, tmp_path / "result.json")
        one.items()
        return one.ran, one.not_reached

    ran, not_reached = call()
    assert stop_at in not_reached
    assert sorted([*ran, *not_reached]) == sorted(item.name for item in whole)
    assert json.loads((tmp_path / "result.json").read_text())["items"] == ran
    first = [item.runner == "V2" and not item.components for item in started]
    assert first[:4] == [True] * 4
    assert not any(first[4:])

    stop_at = ""
    ran, none = call()
    assert (len(ran), none) == (len(whole), []), "what an earlier call found counts as well"
    assert {item.name for item in started} == set(not_reached)
    assert (*call(), started) == (ran, [], [])
    options.seconds = None
    call()
    assert len(started) == len(whole), "without a limit everything is run again"


@pytest.mark.process
def test_no_time_left() -> None:
    """Nothing is started, and nothing is said of what was not."""
    item = items.Item("gemma3", tested_engines.ENGINE_COMPONENTS, "V2")
    with pytest.raises(items.OutOfTime):
        items.run(item, how("cpu"), None, 0)
    with pytest.raises(items.OutOfTime):
        items.run(item, how("cpu"), None, 0.05)  # ends it
    with pytest.raises(items.OutOfTime):
        run.benchmark("block_keys", time.monotonic())


def test_the_variables_of_an_item() -> None:
    """On the CPU the second runner is the tests' one, with async scheduling; on a GPU vLLM is only told which one."""
    environ = how("cuda").environment(items.Item("gemma3", ("features",), "V2"))
    assert environ[SWITCH] == "1"
    assert not {"TEST_ENGINE", "TRITON_INTERPRET"} & set(environ)
    environ = how("cpu").environment(items.Item("gemma3", ("features",), "V2"))
    assert (environ["TEST_ENGINE"], environ["TEST_ASYNC_SCHEDULING"]) == ("v2-async", "1")
    assert [environ[f"MMCACHE_{component.upper()}"] for component in ("features", "metrics")] == ["1", "0"]
    assert how("cpu").environment(items.Item("gemma3", (), "V1"))[SWITCH] == "0"


def test_vllm_for_cuda_without_flashinfer() -> None:
    """There is none here. vLLM would not start with Qwen3.5, nor on runner V2; the result says what took its place."""
    assert found.lacks_flashinfer("cuda")
    assert not found.lacks_flashinfer("cpu")
    environ = how("cuda").environment(items.Item("gemma3", ("features",), "V2"))
    assert environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in how("cpu").environment(items.Item("gemma3", ("features",), "V2"))
    assert "FlashInfer" in run.left_out(FOUND)
    assert given(["--gdn-prefill-backend", "triton"]) == {"gdn_prefill_backend": "triton"}


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0rc1", "0.33.1.dev2+gabc", "0.34.0"])
def test_a_vllm_where_nothing_would_be_on(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.version.__version__", version)
    with pytest.raises(EnvironmentProblem, match=re.escape(f"vLLM {version} is outside")):
        found.look("cpu")


@pytest.mark.process
def test_an_amd_gpu_is_not_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM says device_type "cuda" there, too."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    assert platform_name() == "cuda"
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: True)
    assert platform_name() == "rocm"
    with pytest.raises(EnvironmentProblem, match="runs on 'rocm' here, not on 'cuda'"):
        found.look("cuda")
