# SPDX-License-Identifier: Apache-2.0
"""What a room was exercised on decides where it is on: version, model runner, scheduling, and platform for some."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.engine_configuration import CHOSEN
from vllm_mmcache import settings
from vllm_mmcache.upstream import proven, start
from vllm_mmcache.upstream.proven import ENGINE_ROOMS, TOUCHES_TENSORS, Engine, Row, why_unproven

CPU = Engine("0.33", "cpu", 2, "async")
UNKNOWN = Engine("0.33", "cpu")  # before there is a VllmConfig


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every room passed on one engine, and nothing else did."""
    monkeypatch.setattr(proven, "TABLE", [Row(CPU, ENGINE_ROOMS, "a test")])
    monkeypatch.setattr(settings, "_current", settings.Settings())
    monkeypatch.setattr(start, "_off", {})


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("room", ENGINE_ROOMS)
def test_where_nothing_was_run_a_room_is_off(room: str) -> None:
    assert why_unproven(room, CPU) == "" == why_unproven(room, UNKNOWN)
    for other in ({"vllm": "0.34"}, {"runner": 1}, {"scheduling": "sync"}):
        assert f"switch on with MMCACHE_{room.upper()}=1" in why_unproven(room, replace(CPU, **other))
    for platform in ("cuda", "rocm"):
        assert bool(why_unproven(room, replace(CPU, platform=platform))) == (room in TOUCHES_TENSORS)
    assert "0.33, model runner V1 with async scheduling, cpu" in why_unproven(room, replace(CPU, runner=1))


@pytest.mark.usefixtures("table")
def test_rocm_is_not_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = replace(CPU, platform="cuda")
    monkeypatch.setattr(proven, "TABLE", [Row(cuda, ENGINE_ROOMS, "a test")])
    for room in TOUCHES_TENSORS:
        assert why_unproven(room, cuda) == ""
        assert why_unproven(room, replace(cuda, platform="rocm")).startswith("not yet proven on vLLM 0.33")


def test_a_group_that_is_no_engine_room_needs_no_proof() -> None:
    assert why_unproven("lazy_media", Engine("0.99", "abacus")) == ""


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize("room", ENGINE_ROOMS)
def test_settings_decide_before_proof(room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proven, "TABLE", [])
    assert "not yet proven" in start.why_off(room)
    monkeypatch.setattr(settings, "_current", settings.Settings(**{room: True}))
    assert start.why_off(room) == ""
    monkeypatch.setattr(settings, "_current", settings.Settings(**{room: False}))
    assert start.why_off(room) == f"switched off by the setting {room}"


def config(runner: int, is_async: bool) -> SimpleNamespace:
    """What is asked of a VllmConfig."""
    return SimpleNamespace(use_v2_model_runner=runner == 2, scheduler_config=SimpleNamespace(async_scheduling=is_async))


def test_rooms_are_settled_when_the_runner_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    here = start.engine_here()
    monkeypatch.setattr(proven, "TABLE", [Row(replace(CPU, vllm=here.vllm), ENGINE_ROOMS, "a test")])
    monkeypatch.setattr(start, "_off", {})
    monkeypatch.setattr(settings, "_current", settings.Settings(features=True))
    assert start.settle(config(2, True)) == {}
    off = start.settle(config(1, True))
    assert set(off) == set(ENGINE_ROOMS) - {"features"}, "what a setting switches on stays on"
    assert all("model runner V1 with async scheduling" in reason for reason in off.values())
    assert [getattr(settings.current(), room) for room in ENGINE_ROOMS] == [False] * 5 + [True]
    settings.use(settings.Settings())  # as when --additional-config is read again, by the executor and the worker
    assert set(start.settle(config(1, True))) == set(ENGINE_ROOMS)
    assert {getattr(settings.current(), room) for room in ENGINE_ROOMS} == {False}


@pytest.mark.engine
def test_an_engine_without_proof_runs_without_the_rooms() -> None:
    """A real engine whose runner nobody tried: it says which rooms are off, and answers."""
    program = """
import json
from vllm_mmcache import settings
from vllm_mmcache.upstream import proven, start
from dataclasses import replace
proven.TABLE[:] = [replace(row, engine=replace(row.engine, scheduling="never")) for row in proven.TABLE]
proven.TABLE.append(proven.Row(replace(start.engine_here(), runner=3), proven.ENGINE_ROOMS, "for the start alone"))
import tempfile, pathlib
from vllm_mmcache.prove.engines import EngineConfig, EnginePool
from vllm_mmcache.prove.scenarios import one, picture, user
pool = EnginePool(pathlib.Path(tempfile.mkdtemp()))
rig = pool.get(EngineConfig("qwen2-vl"))
ask = user(picture(1), "What is it?")
answers = [one(rig, ask), one(rig, ask)]
same = answers[0].token_ids == answers[1].token_ids
wanted = {room: getattr(settings.current(), room) for room in proven.ENGINE_ROOMS}
print(json.dumps([same, answers[1].num_cached_tokens, wanted, rig.features is None]))
pool.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | CHOSEN.environment() | {"VLLM_LOGGING_LEVEL": "WARNING"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    same, num_cached, wanted, without_features = json.loads(done.stdout.splitlines()[-1])
    assert same
    assert num_cached > 0
    assert without_features
    assert wanted == dict.fromkeys(ENGINE_ROOMS, False)
    assert "off for this engine: block_keys: not yet proven on vLLM" in done.stdout + done.stderr


def test_the_table_is_in_its_own_form() -> None:
    assert proven.written(proven.rows()) == proven.FILE.read_text()
