# SPDX-License-Identifier: Apache-2.0
"""What `mmcache doctor` shows, in which order, and how it ends."""

import logging
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from vllm_mmcache.base import settings
from vllm_mmcache.base.status import State
from vllm_mmcache.cli import connectors, doctor, doctor_text, plugins, preview

FACTS: dict[str, Any] = {
    "mmcache": "0.1", "python": "3.11", "model": "some/model",
    "vllm": {"version": "0.32.0", "distribution": "vllm 0.32.0", "platform": "cpu", "device": None},
    "packages": {"torch": "2.13", "transformers": "5"},
    "engine": {"runner": 2, "scheduling": "async", "words": "vLLM 0.32"},
    "components": {"features": {"state": "on", "reason": ""}},
    "symbols": None, "settings": [], "notes": ["a note"], "findings": [], "block_keys": {},
}  # fmt: skip
FINDING = {"where": "here", "seen": "a fault", "cure": "a cure"}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("num_findings", [0, 1, 2])
def test_the_exit_status_says_whether_there_are_findings(
    num_findings: int, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [{"where": "here", "seen": "a fault", "cure": "none"}] * num_findings
    monkeypatch.setattr(doctor, "examine", lambda *args, **kwargs: {"findings": found})
    monkeypatch.setattr(doctor_text, "show", lambda facts, with_settings: None)
    monkeypatch.setattr(logging, "disable", lambda level: None)
    with pytest.raises(typer.Exit) as ended:
        doctor.doctor(None, [], as_json=as_json)
    assert ended.value.exit_code == (1 if num_findings else 0)


def shown(capsys: pytest.CaptureFixture[str], **more: Any) -> list[str]:
    doctor_text.show(FACTS | more, with_settings=False)
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_findings_come_first_and_a_verdict_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    lines = shown(capsys, findings=[FINDING, FINDING])
    places = [
        lines.index(line) for line in ("finding in here: a fault", "cure: a cure", "note: a note", "features  on")
    ]
    assert places == sorted(places)
    assert lines[-1] == "2 findings, shown above with what to do"
    assert shown(capsys, findings=[FINDING])[-1].startswith("1 finding,")
    assert shown(capsys)[-1] == "no findings"


def test_nothing_is_predicted_for_a_model_that_was_not_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    engine = {**FACTS["engine"], "runner": None}
    lines = shown(capsys, components={}, engine=engine, findings=[FINDING])
    assert "Nothing is predicted for some/model, for the reasons above." in lines
    assert not any("on" in line.split() for line in lines[1:-1])
    assert "Nothing is predicted, for the reasons above." in shown(capsys, components={}, model=None)


@pytest.mark.parametrize(("is_disabled", "expected"), [(False, set()), (True, {"off"})])
def test_what_is_said_of_a_model_that_was_not_read(
    is_disabled: bool, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only that all is off, if it is off for every model."""
    monkeypatch.setattr(doctor, "broken_packages", list)
    monkeypatch.setattr(doctor, "vllm_facts", lambda findings: FACTS["vllm"])
    monkeypatch.setattr(doctor, "engine_facts", lambda config: FACTS["engine"])
    monkeypatch.setattr(doctor, "configuration", lambda model, arguments, findings: None)
    monkeypatch.setattr(preview, "components", lambda config: {"metrics": State("on"), "features": State("off", "why")})
    monkeypatch.setattr(doctor, "component_findings", lambda components, chosen: [])
    monkeypatch.setattr(plugins, "why_left_out", lambda: "")
    monkeypatch.setattr(settings, "use", lambda chosen: None)
    monkeypatch.setenv("MMCACHE_DISABLE", str(int(is_disabled)))
    states = doctor.examine("some/model", [], with_symbols=False)["components"].values()
    assert {state["state"] for state in states} == expected
    known = doctor.examine(None, [], with_symbols=False)["components"]
    assert known["features"]["state"] == "off"
    assert (known["metrics"]["state"] == "on") is not is_disabled


def test_a_component_whose_module_can_not_be_imported_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """All else is said as with it, also of the functions of vLLM."""
    from vllm_mmcache.lifecycle.symbols import symbols

    module = "vllm_mmcache.components.block_keys.hooks"
    rest = [row for row in symbols() if row["group"] != "block_keys"]
    monkeypatch.setitem(sys.modules, module, None)
    found = preview.components(None)
    assert found["block_keys"].reason.startswith(f"{module} can't be imported (")
    (finding,) = doctor.component_findings(found, settings.Settings())
    assert finding["where"] == "symbols of block_keys"
    assert finding["seen"] == f"{found['block_keys'].reason}. Off: block_keys"
    assert symbols() == rest


@pytest.mark.parametrize("place", ["option", "after MODEL", "not given"])
def test_observe_is_the_servers_option(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMCACHE_OBSERVE", "0")
    given = []

    def examine(model: str, arguments: list[str], *, with_symbols: bool) -> dict[str, Any]:
        given.append((arguments, os.environ["MMCACHE_OBSERVE"]))
        return {"findings": []}

    monkeypatch.setattr(doctor, "examine", examine)
    monkeypatch.setattr(doctor_text, "show", lambda facts, with_settings: None)
    monkeypatch.setattr(logging, "disable", lambda level: None)
    after = ["--observe"] if place == "after MODEL" else []
    with pytest.raises(typer.Exit):
        doctor.doctor("some/model", [*after, "--port", "1"], observe=place == "option")
    assert given == [(["--port", "1"], "0" if place == "not given" else "1")]


def test_other_nodes_are_a_note() -> None:
    def noted(**parallel: int) -> bool:
        alone = {"nnodes": 1, "data_parallel_size": 2, "data_parallel_size_local": 2}
        config = SimpleNamespace(parallel_config=SimpleNamespace(**{**alone, **parallel}))
        return any(note.startswith("several nodes:") for note in doctor.notes([], config))

    assert not noted()
    assert noted(nnodes=2)
    assert noted(data_parallel_size_local=1)


@pytest.mark.parametrize(
    ("why", "is_on"), [("", True), ("images would be wrong", True), ("images would be wrong", False)]
)
def test_a_refused_model_is_a_finding(why: str, is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the server, where image_spans refuses it: not where that is off."""
    monkeypatch.setattr(doctor, "broken_packages", list)
    monkeypatch.setattr(doctor, "vllm_facts", lambda findings: FACTS["vllm"])
    monkeypatch.setattr(doctor, "engine_facts", lambda config: FACTS["engine"])
    parallel = SimpleNamespace(nnodes=1, data_parallel_size=1, data_parallel_size_local=1)
    config = SimpleNamespace(parallel_config=parallel, additional_config={})
    monkeypatch.setattr(doctor, "configuration", lambda model, arguments, findings: config)
    monkeypatch.setattr(doctor, "predict", lambda *args: {"image_spans": State("on" if is_on else "off")})
    monkeypatch.setattr(doctor, "wrong_in_vllm", lambda config: "")
    monkeypatch.setattr(doctor, "can_be_audited", lambda config, components: False)
    monkeypatch.setattr(connectors, "findings", lambda *args: [])
    monkeypatch.setattr(preview, "why_refused", lambda config: why)
    monkeypatch.setattr(plugins, "why_left_out", lambda: "")
    monkeypatch.setattr(settings, "use", lambda chosen: None)
    found = doctor.examine("some/model", [], with_symbols=False)["findings"]
    assert [finding["seen"] for finding in found] == ([why] if why and is_on else [])
