# SPDX-License-Identifier: Apache-2.0
"""docker/alerts.yaml: promtool takes it, each alert fires on its fault and on nothing else, and its metrics exist."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # comes with vLLM

from tests.system.docker.metrics import exposed, named, promtool
from vllm_mmcache.audit.auditor import FOUND_WRONG
from vllm_mmcache.base.status import State, combine
from vllm_mmcache.trial.verdict import NOT_PASSED, Verdict

REPO = Path(__file__).parents[3]
DOCKER = REPO / "docker"
ALERTS = DOCKER / "alerts.yaml"
CASES = Path(__file__).with_name("alerts_test.yaml")
RULES: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]


def run_cases(folder: Path, rules: Path, firing: list[str]) -> "subprocess.CompletedProcess[str]":
    cases = yaml.safe_load(CASES.read_text())
    cases["rule_files"] = [str(rules)]
    healthy, faulty = (case["promql_expr_test"][0] for case in cases["tests"])
    assert healthy["exp_samples"] == []
    faulty["exp_samples"] = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing]
    file = folder / "cases.yaml"
    file.write_text(yaml.safe_dump(cases))
    return promtool("test", "rules", file)


@pytest.mark.process
def test_promtool_takes_the_rules_and_the_configuration() -> None:
    done = promtool("check", "rules", ALERTS)
    assert done.returncode == 0, done.stderr
    assert f"SUCCESS: {len(RULES)} rules found" in done.stdout
    done = promtool("check", "config", DOCKER / "prometheus.yaml")
    assert done.returncode == 0, done.stderr
    assert "1 rule files found" in done.stdout


@pytest.mark.process
def test_promtool_finds_what_is_wrong(tmp_path: Path) -> None:
    """Negative control."""
    file = tmp_path / "alerts.yaml"
    file.write_text(ALERTS.read_text().replace("sum by (job, instance)", "sum by (job, instance", 1))
    assert promtool("check", "rules", file).returncode != 0


@pytest.mark.process
def test_each_alert_fires_on_its_fault_and_none_on_a_healthy_server(tmp_path: Path) -> None:
    done = run_cases(tmp_path, ALERTS, [rule["alert"] for rule in RULES])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.parametrize("number", range(len(RULES)))
def test_an_alert_that_never_fires_is_found(tmp_path: Path, number: int) -> None:
    """Negative control: with a threshold that nothing reaches, that alert is missed."""
    rules = yaml.safe_load(ALERTS.read_text())
    rule = rules["groups"][0]["rules"][number]
    rule["expr"] = f"({rule['expr']}) > 1e12"
    file = tmp_path / "alerts.yaml"
    file.write_text(yaml.safe_dump(rules))
    done = run_cases(tmp_path, file, [rule["alert"] for rule in RULES])
    assert done.returncode != 0
    (got,) = re.findall(r"got:(.*)", done.stdout + done.stderr)
    missed = {rule["alert"] for rule in RULES} - set(re.findall(r'alertname="(\w+)"', got))
    assert missed == {RULES[number]["alert"]}


TRIED = Verdict(differed={"features": "an answer is far"}, untried={"block_keys": "its time was over"})
FOUND_AT_WORK = State("off", f"3 {FOUND_WRONG}")
FOUND_AT_START = State("off", TRIED.reason_of("features"))
NOT_THERE = State("unneeded", "this model has no such layers")


@pytest.mark.parametrize(
    ("state", "fires"),
    [
        (FOUND_AT_START, True),
        (State("off", TRIED.reason_of("block_keys")), True),
        (State("off", f"{NOT_PASSED} was not made"), True),
        (FOUND_AT_WORK, True),
        (combine([("engine 0", FOUND_AT_WORK), ("engine 1", FOUND_AT_START)]), True),
        (combine([("api", NOT_THERE), ("engine 0", FOUND_AT_START), ("engine 1", FOUND_AT_START)]), True),
        (State("off", "needs features, which is off"), False),
        (State("off", "switched off by the setting features"), False),
        (State("off", "not yet proven here (this engine can't try it by itself: a KV connector)"), False),
    ],
)
def test_the_reasons_for_switching_off_are_those_of_the_code(state: State, fires: bool) -> None:
    (rule,) = (rule for rule in RULES if rule["alert"] == "MmcacheComponentSwitchedOff")
    (pattern,) = re.findall(r'state="off", *reason=~"([^"]*)"', rule["expr"])
    assert state.state == "off"
    assert bool(re.fullmatch(pattern, state.reason)) is fires


def test_every_alert_says_what_to_do() -> None:
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "action"}
    assert len({rule["alert"] for rule in RULES}) == len(RULES)


def test_the_metrics_exist() -> None:
    assert named(*(rule["expr"] for rule in RULES)) <= exposed()
    assert not named("mmcache:no_such_total") <= exposed(), "negative control"
