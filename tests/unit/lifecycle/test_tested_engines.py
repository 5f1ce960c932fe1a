# SPDX-License-Identifier: Apache-2.0
"""What a component was tested on decides where it is on: version, model runner, scheduling, and platform for some."""

from dataclasses import replace

import pytest

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


def test_the_table_is_in_its_own_form() -> None:
    assert tested_engines.written(tested_engines.rows()) == tested_engines.FILE.read_text()
