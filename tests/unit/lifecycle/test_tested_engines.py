# SPDX-License-Identifier: Apache-2.0
"""What a component was tested on decides where it is on: version, model runner, scheduling, and platform for some."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ParallelConfig

from vllm_mmcache.lifecycle import tested_engines
from vllm_mmcache.lifecycle.tested_engines import ENGINE_COMPONENTS, TOUCHES_TENSORS, Engine, Row, Served, why_unproven

CPU = Served("0.33", "cpu", 2, "async", "Gemma3ForConditionalGeneration", 1)
ENGINE_OF_CPU = Engine("0.33", "cpu", 2, "async")
UNKNOWN = Served("0.33", "cpu")  # before there is a VllmConfig


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every component passed on one engine, and nothing else did."""
    monkeypatch.setattr(tested_engines, "TABLE", [Row(ENGINE_OF_CPU, ENGINE_COMPONENTS, "a test")])


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("component", ENGINE_COMPONENTS)
def test_where_nothing_was_run_a_component_is_off(component: str) -> None:
    assert why_unproven(component, CPU) == "" == why_unproven(component, UNKNOWN)
    for other in ({"vllm": "0.34"}, {"runner": 1}, {"scheduling": "sync"}):
        assert f"MMCACHE_{component.upper()}=1 switches it on" in why_unproven(component, replace(CPU, **other))
    for platform in ("cuda", "rocm"):
        assert bool(why_unproven(component, replace(CPU, platform=platform))) == (component in TOUCHES_TENSORS)
    assert "0.33, model runner V1 with async scheduling, cpu" in why_unproven(component, replace(CPU, runner=1))


@pytest.mark.usefixtures("table")
def test_rocm_is_not_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = replace(CPU, platform="cuda")
    row = Row(replace(ENGINE_OF_CPU, platform="cuda"), ENGINE_COMPONENTS, "a test")
    monkeypatch.setattr(tested_engines, "TABLE", [row])
    for component in TOUCHES_TENSORS:
        assert why_unproven(component, cuda) == ""
        assert why_unproven(component, replace(cuda, platform="rocm")).startswith("not yet proven on vLLM 0.33")


def test_a_group_that_is_no_engine_component_needs_no_proof() -> None:
    assert why_unproven("lazy_media", Served("0.99", "abacus")) == ""


@pytest.mark.parametrize("component", ENGINE_COMPONENTS)
def test_a_row_can_be_about_some_models_and_one_device(component: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row(ENGINE_OF_CPU, ENGINE_COMPONENTS, "a test", ("Gemma3ForConditionalGeneration",), 1)
    monkeypatch.setattr(tested_engines, "TABLE", [row])
    assert why_unproven(component, CPU) == "" == why_unproven(component, UNKNOWN)
    qwen = why_unproven(component, replace(CPU, architecture="Qwen3VLForConditionalGeneration"))
    assert ", cpu, Qwen3VLForConditionalGeneration on 1 device: " in qwen
    assert "Gemma3ForConditionalGeneration on 2 devices" in why_unproven(component, replace(CPU, num_devices=2))


@pytest.mark.parametrize("is_moe", [False, True])
def test_a_data_parallel_engine_counts_the_devices_that_others_count_for_it(is_moe: bool) -> None:
    """vLLM tells an engine of a dense model that there is one, and no one else."""
    parallel = ParallelConfig(data_parallel_size=2, tensor_parallel_size=2, distributed_executor_backend="mp")
    config: Any = SimpleNamespace(
        parallel_config=parallel,
        model_config=SimpleNamespace(is_moe=is_moe),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        use_v2_model_runner=False,
    )
    before = tested_engines.engine_here(config).num_devices
    if not is_moe:
        parallel.reconfigure_for_independent_dp_rank()
    assert tested_engines.engine_here(config).num_devices == before == (4 if is_moe else 2)


def test_the_table_is_in_its_own_form() -> None:
    assert tested_engines.written(tested_engines.rows()) == tested_engines.FILE.read_text()
