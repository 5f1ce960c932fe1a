# SPDX-License-Identifier: Apache-2.0
"""docs/grafana.json: what Grafana asks of a dashboard is there, its queries are Prometheus's, and its metrics exist.

No Grafana is run here. tests/system/page/test_panels.py asks a real Prometheus what it would show.
"""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # comes with vLLM

from tests.system.docker.metrics import exposed, named, promtool

DASHBOARD: dict[str, Any] = json.loads((Path(__file__).parents[3] / "docs" / "grafana.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def queries() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(one[at] < other[at] + other[size] and other[at] < one[at] + one[size] for at, size in ("xw", "yh"))


def test_the_dashboard_is_one() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert {"title", "uid", "version", "time", "refresh", "templating"} <= set(DASHBOARD)
    variables = {variable["name"]: variable["type"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "job": "query"}
    assert len({panel["id"] for panel in PANELS}) == len({panel["title"] for panel in PANELS}) == len(PANELS)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel(panel: dict[str, Any]) -> None:
    assert panel["type"] in ("stat", "timeseries")
    assert panel["datasource"] == SOURCE
    assert panel["description"].endswith(".")
    place = panel["gridPos"]
    assert set(place) == set("xywh")
    assert 0 <= place["x"] < place["x"] + place["w"] <= COLUMNS
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
    for target in panel["targets"]:
        assert target["datasource"] == SOURCE
        assert target["legendFormat"]
        assert '{job=~"$job"' in target["expr"], "it must follow the variable"


def test_no_panel_hides_another() -> None:
    assert not [
        (one["title"], other["title"])
        for one, other in combinations(PANELS, 2)
        if overlap(one["gridPos"], other["gridPos"])
    ]
    assert overlap({"x": 0, "y": 0, "w": 2, "h": 2}, {"x": 1, "y": 1, "w": 2, "h": 2}), "negative control"


def test_its_metrics_exist() -> None:
    assert named(*queries()) <= exposed()
    assert not named("rate(mmcache:tower_pictures_total[1m])") <= exposed(), "negative control"


def test_every_table_drop_and_error_is_shown() -> None:
    worth_a_look = {
        name for name in exposed() if name.endswith(("_errors_total", "_dropped_total", "_set_aside_total"))
    }
    worth_a_look |= {name for name in exposed() if name.endswith("_budget_bytes")} | {"component_info"}
    assert worth_a_look <= named(*queries())


@pytest.mark.process
def test_promtool_takes_the_queries(tmp_path: Path) -> None:
    rules = [
        {"record": f"query:{number}:x", "expr": query.replace("$__rate_interval", "1m").replace("$job", ".*")}
        for number, query in enumerate(queries())
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = promtool("check", "rules", file)
    assert done.returncode == 0, done.stderr
    assert f"SUCCESS: {len(rules)} rules found" in done.stdout
    file.write_text(file.read_text().replace("sum by (", "sum bye ("))
    assert promtool("check", "rules", file).returncode != 0, "negative control"
