# SPDX-License-Identifier: Apache-2.0
"""docs/grafana.json asked of a real Prometheus that reads a real server: no query fails, and no panel stays empty."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from scripts.dashboard import DASHBOARD, QUIET, problems, problems_left, prometheus
from scripts.screenshots import load, observed_server
from tests.support.programs import program

pytestmark = pytest.mark.engine

LOAD_S = 30
PANELS: dict[str, Any] = json.loads(DASHBOARD.read_text())


@pytest.fixture(scope="module")
def url(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of Prometheus, after a load of screenshots, which Chromium draws."""
    program("prometheus")
    with observed_server(tmp_path_factory.mktemp("server")) as (server, _), prometheus(server.url) as asked:
        load(server.url, LOAD_S)
        yield asked


def spoilt(title: str, expression: str) -> dict[str, Any]:
    """The dashboard with another query in a panel's first place."""
    other = copy.deepcopy(PANELS)
    (panel,) = (panel for panel in other["panels"] if panel["title"] == title)
    panel["targets"][0]["expr"] = expression
    return other


def test_every_panel_shows_something(url: str) -> None:
    assert problems_left(url, PANELS) == []


def test_what_is_wrong_is_found(url: str) -> None:
    """The negative control: an unknown metric, no query of Prometheus', another job, and panels that stay at zero."""
    title = "Vision tower"
    unknown = spoilt(title, 'rate(mmcache:tower_pictures_total{job=~"$job"}[$__rate_interval])')
    assert problems(url, unknown) == [f"{title}: no metric mmcache:tower_pictures_total"]
    (said,) = problems(url, spoilt(title, "sum(rate(mmcache:tower_images_total{job=~"))
    assert said.startswith(f"{title}: ")
    assert "parse error" in said
    title = "Time in the vision tower"
    other_job = spoilt(title, 'sum(rate(mmcache:tower_seconds_total{job="other"}[$__rate_interval]))')
    assert problems(url, other_job) == [f"{title}: empty"]
    empty = set(problems(url, PANELS, {}))
    assert "Checkpoints at image boundaries: empty" in empty
    assert empty <= {f"{title}: empty" for title in QUIET}
    assert problems(url, PANELS, {**QUIET, "No such": "a test"}) == ["No such: no such panel"]
    job = copy.deepcopy(PANELS)
    job["templating"]["list"][1]["query"]["query"] = "label_values(vllm:num_requests_running, instance)"
    (said,) = problems(url, job)
    assert said.startswith("variable job: ")
