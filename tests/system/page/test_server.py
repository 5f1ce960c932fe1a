# SPDX-License-Identifier: Apache-2.0
"""The page and `mmcache explain` on a real server with two keys: `mmcache serve --observe`, one for all tests."""

import base64
import json
import os
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml  # type: ignore[import-untyped]  # comes with vLLM
from mmcache_tools.harness.server import CPU_ARGS, Server, serve, stop
from mmcache_tools.zoo import build_cached

from tests.support import files
from tests.system.cli.test_commands import assert_one_line, mmcache
from tests.system.page.conftest import ARTEFACTS
from vllm_mmcache.components.observe.record.schema import from_json
from vllm_mmcache.exactness.pictures import ellipses

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.engine

API_KEY = "a key of this server's clients"
ADMIN_KEY = "the-operator-has-this-one"
CLIENT = {"Authorization": f"Bearer {API_KEY}"}
OPERATOR = {"Authorization": f"Bearer {ADMIN_KEY}"}
SECRET = "Nobody may read this sentence."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = build_cached("qwen3-vl", tmp_path_factory.mktemp("zoo"))
    args = (*CPU_ARGS, "--served-model-name", "zoo", "--api-key", API_KEY, "--observe")
    environ = {"VLLM_LOGGING_LEVEL": "INFO", "MMCACHE_ADMIN_KEY": ADMIN_KEY}  # other tests' engines are quieter
    with serve(model, log_path=tmp_path_factory.mktemp("logs") / "server.log", env=environ, args=args) as serving:
        yield serving


def picture(name: str) -> dict[str, Any]:
    text = base64.b64encode(files.saved(ellipses(name, (320, 240)), "PNG", compress_level=0)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}


def ask(server: Server, messages: list[dict[str, Any]]) -> Any:
    request = {"model": "zoo", "messages": messages, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=request, headers=CLIENT, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def records(server: Server, path: str = "?full=1") -> Any:
    return httpx.get(f"{server.url}/mmcache/records{path}", headers=OPERATOR, timeout=60).json()


def test_the_keys_open_different_doors(server: Server) -> None:
    """The clients' key tells nothing of other clients; the operator's is no client's."""
    data = ("/mmcache/records", "/mmcache/records/x", "/mmcache/totals", "/mmcache/components")
    for headers in ({}, {"Authorization": "Bearer wrong"}, CLIENT):
        assert [httpx.get(server.url + path, headers=headers, timeout=60).status_code for path in data] == [401] * 4
    assert [httpx.get(server.url + path, headers=OPERATOR, timeout=60).status_code for path in data] == [
        200,
        404,
        200,
        200,
    ]
    statuses = [httpx.get(f"{server.url}/v1/models", headers=h, timeout=60).status_code for h in ({}, OPERATOR, CLIENT)]
    assert statuses == [401, 401, 200]
    assert httpx.get(f"{server.url}/mmcache", timeout=60).status_code == 200  # the page itself holds nothing


def test_a_conversation(server: Server, page: "Page") -> None:
    from playwright.sync_api import expect

    page.goto(f"{server.url}/mmcache")
    page.fill("#key", ADMIN_KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_class("live")
    page.problems.clear()  # type: ignore[attr-defined]  # the 401

    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SECRET},
        {"role": "user", "content": [picture("one"), {"type": "text", "text": "What is this? " * 20}]},
    ]
    answers = []
    for question in ("And what is that?", "Is it the same?"):
        answers.append(ask(server, messages))
        expect(page.locator("#list li").first).to_contain_text(answers[-1]["id"])
        said = answers[-1]["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [
            picture(question), {"type": "text", "text": question}]}]  # fmt: skip
    for answer in answers:
        (found,) = records(server, f"?full=1&id={answer['id']}")["records"]
        record = from_json(found)
        cached = answer["usage"]["prompt_tokens_details"]
        assert record.reused_tokens == (cached["cached_tokens"] if cached else 0)
        assert record.reused_tokens == sum(segment.reused_tokens for segment in record.segments)
        page.locator("#list a", has_text=answer["id"]).click()
        expect(page.locator("#detail-title")).to_have_text(f"Request {record.id}")
        expect(page.locator("#facts")).to_contain_text(f"{record.reused_tokens:,} of {record.prompt_tokens:,}")
        assert page.locator("#bar button").count() == len(record.segments)
        told = mmcache("explain", answer["id"], "--url", server.url, MMCACHE_ADMIN_KEY=ADMIN_KEY)
        assert f"{record.reused_tokens} of {record.prompt_tokens} prompt tokens reused" in told.stdout
    assert records(server)["records"][-1]["reused_tokens"] > 0
    page.screenshot(path=ARTEFACTS / "server.png", full_page=True)


def test_what_is_in_force_is_said_everywhere_alike(server: Server, page: "Page") -> None:
    """In the JSON, on the page, on /metrics and in the log, with where things are; the wish before it is no more."""
    told = httpx.get(f"{server.url}/mmcache/components", headers=OPERATOR, timeout=60).json()
    on = {component for component, said in told["components"].items() if said["state"] == "on"}
    assert {"identity", "observe", "features"} <= on
    assert told["components"]["image_spans"]["state"] == "unneeded"
    assert {"api", "engine 0", "worker 0 of engine 0"} == set(told["places"])
    assert told["places"]["worker 0 of engine 0"]["features"] == {"state": "on", "reason": ""}
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    for component, said in told["components"].items():
        assert re.search(
            rf'mmcache:component_info{{[^}}]*component="{component}"[^}}]*state="{said["state"]}"', metrics
        ), component
        older = rf'mmcache:room_info{{[^}}]*room="{component}"[^}}]*state="{said["state"]}"'
        assert re.search(older, metrics), component
    older_page = httpx.get(f"{server.url}/mmcache/rooms", headers=OPERATOR, timeout=60).json()
    assert older_page == told
    assert older_page["rooms"] == older_page["components"]
    totals = httpx.get(f"{server.url}/mmcache/totals", headers=OPERATOR, timeout=60).json()
    assert {name: totals[name] for name in told} == told
    log = server.log_path.read_text(errors="replace")
    assert ADMIN_KEY not in log
    assert log.count("mmcache: wanted: requests recorded. What is so, the server says") == 1
    assert "mmcache: requests are recorded\n" in log
    assert "mmcache: features are kept: RAM (2.0GiB)\n" in log
    assert f"mmcache: the page is {server.url}/mmcache" in log


def test_nothing_private_is_told(server: Server, page: "Page") -> None:
    ask(server, [{"role": "user", "content": [picture("secret"), {"type": "text", "text": SECRET}]}])
    told = json.dumps(records(server))
    words = re.findall(r"\w{6,}", SECRET)
    assert not [word for word in words if word in told]
    assert "base64" not in told


def test_an_id_that_a_client_chose_twice(server: Server) -> None:
    """Both requests have a record: the second one replaces nothing."""
    body = {"model": "zoo", "max_tokens": 2, "messages": [{"role": "user", "content": "One. " * 40}]}
    for content in ("One. " * 40, "Two. " * 50):
        body["messages"] = [{"role": "user", "content": content}]
        headers = CLIENT | {"X-Request-Id": "mine"}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60).json()
        assert answer["id"] == "chatcmpl-mine"
    found = records(server, "?full=1&id=chatcmpl-mine")["records"]
    assert len({record["id"] for record in found}) == 2
    assert found[0]["prompt_tokens"] > found[1]["prompt_tokens"], "newest first"


def test_tenants_learn_nothing_of_each_other(server: Server) -> None:
    """Neither from an answer, all of it, nor does the operator's view compare what they sent."""

    def ask_as(salt: str, question: str) -> httpx.Response:
        body = {"model": "zoo", "max_tokens": 2, "temperature": 0, "cache_salt": salt, "messages": [
            {"role": "user", "content": [picture("shared"), {"type": "text", "text": question}]}]}  # fmt: skip
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=CLIENT, timeout=60)

    question = "The same question of two tenants. " * 8
    first, again, other = ask_as("one", question), ask_as("one", question), ask_as("two", question)
    found = [records(server, f"?full=1&id={answer.json()['id']}")["records"][0] for answer in (first, again, other)]
    assert found[1]["nearest"]["id"] == found[0]["id"]
    assert found[2]["nearest"] is None
    assert [miss["reason"] for miss in found[2]["misses"]] == ["new_content"]
    assert found[0]["salt"] == found[1]["salt"] != found[2]["salt"]
    private = [part for record in found for part in (record["id"], record["salt"], record["server"])]
    private += [segment["image"]["digest"] for record in found for segment in record["segments"] if segment["image"]]
    for answer in (first, again, other):
        told = json.dumps([dict(answer.headers), answer.json()])
        assert not [part for part in private if part in told]
        assert "mmcache" not in told
    assert other.json()["usage"] == first.json()["usage"], "as if it were the first"


def test_explain_says_what_is_wrong(server: Server) -> None:
    assert_one_line(mmcache("explain", "--url", server.url), "the admin key is missing")
    assert_one_line(mmcache("explain", "none", "--url", server.url, MMCACHE_ADMIN_KEY=ADMIN_KEY), "no record 'none'")


def test_the_metrics_name_every_outcome_of_dashboard_and_alerts(server: Server) -> None:
    repo = ARTEFACTS.parents[1]
    dashboard = json.loads((repo / "docs" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    alerts = yaml.safe_load((repo / "docker" / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert len(queries) > 5
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    for name in {name for query in queries for name in re.findall(r"(?:mmcache|vllm):\w+", query)}:
        assert f"\n# TYPE {name} " in metrics, name
    for name in {name for rule in alerts for name in re.findall(r"(?:mmcache|vllm):\w+", rule["expr"])}:
        assert f"\n# TYPE {name} " in metrics, name
    labels = {label for query in queries for label in re.findall(r"by \((\w+)\)", query)}
    assert labels == {"reason", "features", "outcome", "table", "tier", "place"}
    for label in labels:
        assert f'{label}="' in metrics


def test_the_metrics_say_how_full_tables_are(server: Server) -> None:
    """Of the API server, which a thread looks at, and of the engine, whose sizes come with its statistics."""
    ask(server, [{"role": "user", "content": [picture("tables"), {"type": "text", "text": "What is this?"}]}])
    wanted = {"images", "texts", "records", "observed"}
    of_engine = {"features_ram", "history"}
    deadline = time.monotonic() + 60
    while True:
        ask(server, [{"role": "user", "content": "Go on."}])  # the engine's sizes come with the statistics of a step
        metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
        sizes = re.findall(r'^mmcache:table_bytes\{table="(\w+)"\} (\S+)$', metrics, re.MULTILINE)
        sizes += re.findall(r'^mmcache:engine_table_bytes\{engine="0",table="(\w+)"\} (\S+)$', metrics, re.MULTILINE)
        full = {table for table, size in sizes if float(size) > 0}
        if wanted | of_engine <= full or time.monotonic() > deadline:
            break
        time.sleep(0.5)
    assert wanted | of_engine <= full
    budgets = dict(re.findall(r'^mmcache:table_budget_bytes\{table="(\w+)"\} (\S+)$', metrics, re.MULTILINE))
    assert float(budgets["records"]) == 64 << 20


def test_z_server_gone(server: Server, page: "Page") -> None:
    """The last one: it stops the server."""
    from playwright.sync_api import expect

    page.goto(f"{server.url}/mmcache")
    page.fill("#key", ADMIN_KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_class("live")
    server.process.terminate()  # as an operator does: the server ends its engine; in a group the engine may go first
    server.process.wait(60)
    stop(server.process)
    # vLLM may find its engine dead while it ends it; nothing of ours is to be in a traceback.
    assert not re.search(r'File ".*/vllm_mmcache/', server.log_path.read_text(errors="replace"))
    expect(page.locator("#status")).to_contain_text("The server does not answer")
    assert page.locator("#list li").count() > 0
    page.goto("about:blank")  # asks no more
    page.problems.clear()  # type: ignore[attr-defined]
    assert_one_line(mmcache("explain", "--url", server.url, MMCACHE_ADMIN_KEY=ADMIN_KEY), "no answer from")


def test_only_where_the_operator_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own rule, with vLLM's own loader; and what `mmcache serve --observe` sets."""
    from argparse import Namespace

    from fastapi import FastAPI
    from vllm.plugins.endpoint_plugins.interface import attach_endpoint_plugins

    from vllm_mmcache.base.errors import EnvironmentProblem
    from vllm_mmcache.cli.serve import observe_requests

    def paths() -> set[str]:
        app = FastAPI()
        app.state.args = Namespace(api_key=None)
        attach_endpoint_plugins(app, ("generate",))
        return {path for route in app.routes if (path := getattr(route, "path", "")).startswith("/mmcache")}

    monkeypatch.setenv("MMCACHE_OBSERVE", "")  # set first, so that what the command sets is taken back
    for named in (None, "mmcache", "", "other"):
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        if named is not None:
            monkeypatch.setenv("VLLM_PLUGINS", named)
        assert paths() == set(), named
    for named in (None, "mmcache", "mmcache,mmcache_observe"):
        monkeypatch.setenv("VLLM_PLUGINS", named or "")
        if named is None:
            monkeypatch.delenv("VLLM_PLUGINS")
        observe_requests()
        assert {"mmcache", "mmcache_observe"} <= set(os.environ["VLLM_PLUGINS"].split(","))
        assert os.environ["MMCACHE_OBSERVE"] == "1"
        assert "/mmcache/records" in paths()
    monkeypatch.setenv("MMCACHE_DISABLE", "1")
    with pytest.raises(EnvironmentProblem, match="MMCACHE_DISABLE"):
        observe_requests()
