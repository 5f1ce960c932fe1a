# SPDX-License-Identifier: Apache-2.0
"""Asks a real Prometheus what the panels of docs/grafana.json would show of a server.

The variables are replaced as Grafana replaces them, and the queries are sent to the HTTP API that Grafana asks. Grafana
itself is not run: how a panel is drawn is not seen here.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmcache_tools.harness.server import free_port, stop

from tests.support.programs import find

DASHBOARD = Path(__file__).parents[1] / "docs" / "grafana.json"
JOB = "vllm"
SCRAPE_S = 1
READY_TIMEOUT_S = 60
POINTS = 1000  # in a panel's width, by which Grafana chooses the distance between two of them
RANGE_S = 3600  # what the dashboard shows where nobody has chosen: time.from in its file

QUIET = {
    "Checkpoints at image boundaries": "the model has neither sliding-window nor Mamba layers",
    "Components that are not on": "all that this model needs is on",
    "Lost, failed, set aside": "nothing of it happens to a healthy server",
    "Steps that wait for pixels": "features are kept longer than the minute that is looked at",
}
"""Title of a panel that may show nothing but zeros while all is well -> why."""


@contextlib.contextmanager
def prometheus(server_url: str) -> Iterator[str]:
    """The address of a Prometheus that reads a server's metrics every second, until the block ends.

    Raises: RuntimeError where the program is missing or does not become ready.
    """
    program = find("prometheus")
    if program is None:
        raise RuntimeError("no prometheus: scripts/find_programs takes it out of Debian's package")
    with tempfile.TemporaryDirectory() as folder:
        scrape = {"job_name": JOB, "static_configs": [{"targets": [server_url.removeprefix("http://")]}]}
        configuration = Path(folder, "prometheus.yml")  # JSON is YAML, too
        configuration.write_text(
            json.dumps({"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": [scrape]})
        )
        address = f"127.0.0.1:{free_port()}"
        command = [program, f"--config.file={configuration}", f"--storage.tsdb.path={folder}/data"]
        command += [f"--web.listen-address={address}", "--log.level=warn"]
        log = Path(folder, "log")
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            deadline = time.monotonic() + READY_TIMEOUT_S
            while not _is_ready(f"http://{address}"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"prometheus is not ready: {log.read_text()[-1000:]}")
                time.sleep(0.2)
            yield f"http://{address}"
        finally:
            stop(process)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ask(url: str, path: str, **parameters: Any) -> Any:
    """What Prometheus' API answers as data. Raises: ValueError with its words where it refuses the query."""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=60) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        raise ValueError(json.loads(said)["error"] if said.startswith("{") else said) from None


def step_s(range_s: float = RANGE_S) -> int:
    """Grafana's $__interval: the distance of two points, which is no shorter than that of two scrapes."""
    return max(SCRAPE_S, math.ceil(range_s / POINTS))


def filled_in(expression: str, jobs: str = ".*") -> str:
    """A query without Grafana's variables. Jobs: the value of the variable, which is `.*` where all are chosen."""
    rate_s = max(step_s() + SCRAPE_S, 4 * SCRAPE_S)  # Grafana's $__rate_interval
    return expression.replace("$__rate_interval", f"{rate_s}s").replace("$job", jobs)


def problems(url: str, dashboard: Mapping[str, Any], quiet: Mapping[str, str] | None = None) -> list[str]:
    """What a look at the dashboard would find wrong, in words: nothing where each panel shows what it should.

    A query is wrong that Prometheus refuses, or that names a metric that it has never seen. A panel is empty if none of
    its queries has a value other than zero. `quiet` names panels that may be empty, as QUIET does.
    """
    quiet = QUIET if quiet is None else quiet
    found = [f"{title}: no such panel" for title in quiet.keys() - {panel["title"] for panel in dashboard["panels"]}]
    (variable,) = (one for one in dashboard["templating"]["list"] if one["name"] == "job")
    query = variable["query"]["query"]
    metric, label = query.removeprefix("label_values(").removesuffix(")").split(", ")
    if JOB not in ask(url, f"label/{label}/values", **{"match[]": metric}):
        found.append(f"variable job: {query} does not give {JOB}")
    for panel in dashboard["panels"]:
        title, expressions = panel["title"], [target["expr"] for target in panel["targets"]]
        unknown = [name for name in _metrics(expressions) if not ask(url, "series", **{"match[]": name})]
        found += [f"{title}: no metric {name}" for name in unknown]
        try:
            shows = [_has_values(url, filled_in(expression)) for expression in expressions]
        except ValueError as error:
            found.append(f"{title}: {error}")
            continue
        if not any(shows) and title not in quiet:
            found.append(f"{title}: empty")
    return found


def problems_left(url: str, dashboard: Mapping[str, Any], timeout_s: float = 60) -> list[str]:
    """The same, asked again for a while: the audit waits for an idle engine, and Prometheus for its next scrape."""
    deadline = time.monotonic() + timeout_s
    while (found := problems(url, dashboard)) and time.monotonic() < deadline:
        time.sleep(1)
    return found


def _metrics(expressions: Sequence[str]) -> list[str]:
    return sorted(set(re.findall(r"\b(?:mmcache|vllm):\w+", " ".join(expressions))))


def _has_values(url: str, query: str) -> bool:
    """Whether a panel with this query shows more than zeros. Raises: ValueError where Prometheus refuses it."""
    now = time.time()
    series = ask(url, "query_range", query=query, start=now - RANGE_S, end=now, step=step_s())["result"]
    values = [float(value) for one in series for _, value in one["values"]]
    return any(math.isfinite(value) and value != 0 for value in values)
