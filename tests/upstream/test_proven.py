# SPDX-License-Identifier: Apache-2.0
"""What a room was exercised on decides where it is on: version, model runner, scheduling, and platform for some."""

from dataclasses import replace

import pytest

from vllm_mmcache.lifecycle import tested_engines
from vllm_mmcache.lifecycle.tested_engines import ENGINE_ROOMS, TOUCHES_TENSORS, Engine, Row, why_unproven

CPU = Engine("0.33", "cpu", 2, "async")
UNKNOWN = Engine("0.33", "cpu")  # before there is a VllmConfig


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every room passed on one engine, and nothing else did."""
    monkeypatch.setattr(tested_engines, "TABLE", [Row(CPU, ENGINE_ROOMS, "a test")])


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("room", ENGINE_ROOMS)
def test_where_nothing_was_run_a_room_is_off(room: str) -> None:
    assert why_unproven(room, CPU) == "" == why_unproven(room, UNKNOWN)
    for other in ({"vllm": "0.34"}, {"runner": 1}, {"scheduling": "sync"}):
        assert f"MMCACHE_{room.upper()}=1 switches it on" in why_unproven(room, replace(CPU, **other))
    for platform in ("cuda", "rocm"):
        assert bool(why_unproven(room, replace(CPU, platform=platform))) == (room in TOUCHES_TENSORS)
    assert "0.33, model runner V1 with async scheduling, cpu" in why_unproven(room, replace(CPU, runner=1))


@pytest.mark.usefixtures("table")
def test_rocm_is_not_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = replace(CPU, platform="cuda")
    monkeypatch.setattr(tested_engines, "TABLE", [Row(cuda, ENGINE_ROOMS, "a test")])
    for room in TOUCHES_TENSORS:
        assert why_unproven(room, cuda) == ""
        assert why_unproven(room, replace(cuda, platform="rocm")).startswith("not yet proven on vLLM 0.33")


def test_a_group_that_is_no_engine_room_needs_no_proof() -> None:
    assert why_unproven("lazy_media", Engine("0.99", "abacus")) == ""


def test_the_table_is_in_its_own_form() -> None:
    assert tested_engines.written(tested_engines.rows()) == tested_engines.FILE.read_text()
