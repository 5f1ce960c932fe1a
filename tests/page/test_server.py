# SPDX-License-Identifier: Apache-2.0
"""The page and `mmcache explain` on a real server that asks for a key: `mmcache serve --observe`, one for all tests."""

import base64
import json
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.cli.test_commands import assert_one_line, mmcache
from tests.media import files
from tests.page.conftest import ARTEFACTS
from vllm_mmcache.demo.server import CPU_ARGS, Server, serve, stop
from vllm_mmcache.observe.schema import from_json
from vllm_mmcache.prove.pictures import ellipses
from vllm_mmcache.zoo import build_cached

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.engine

KEY = "a key of this server"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
SECRET = "Nobody may read this sentence."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = build_cached("qwen3-vl", tmp_path_factory.mktemp("zoo"))
    args = (*CPU_ARGS, "--served-model-name", "zoo", "--api-key", KEY, "--observe")
    environ = {"VLLM_LOGGING_LEVEL": "INFO"}  # other tests' engines are quieter
    with serve(model, log_path=tmp_path_factory.mktemp("logs") / "server.log", env=environ, args=args) as serving:
        yield serving


def picture(name: str) -> dict[str, Any]:
    text = base64.b64encode(files.saved(ellipses(name, (320, 240)), "PNG", compress_level=0)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}


def ask(server: Server, messages: list[dict[str, Any]]) -> Any:
    request = {"model": "zoo", "messages": messages, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=request, headers=AUTHORIZED, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def records(server: Server, path: str = "?full=1") -> Any:
    return httpx.get(f"{server.url}/mmcache/records{path}", headers=AUTHORIZED).json()


def test_the_key_guards_the_records(server: Server) -> None:
    for headers, status in (({}, 401), ({"Authorization": "Bearer wrong"}, 401), (AUTHORIZED, 200)):
        for path in ("/mmcache/records", "/mmcache/totals", "/mmcache/rooms", "/v1/models"):
            assert httpx.get(server.url + path, headers=headers).status_code == status, path
    assert httpx.get(f"{server.url}/mmcache").status_code == 200  # the page itself holds nothing


def test_a_conversation(server: Server, page: "Page") -> None:
    from playwright.sync_api import expect

    page.goto(f"{server.url}/mmcache")
    page.fill("#key", KEY)
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
        expect(page.locator("#list li").first).to_contain_text(answers[-1]["id"], timeout=5000)
        said = answers[-1]["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [
            picture(question), {"type": "text", "text": question}]}]  # fmt: skip
    for answer in answers:
        record = from_json(records(server, f"/{answer['id']}"))
        cached = answer["usage"]["prompt_tokens_details"]
        assert record.reused_tokens == (cached["cached_tokens"] if cached else 0)
        assert record.reused_tokens == sum(segment.reused_tokens for segment in record.segments)
        page.locator("#list a", has_text=answer["id"]).click()
        expect(page.locator("#detail-title")).to_have_text(f"Request {answer['id']}")
        expect(page.locator("#facts")).to_contain_text(f"{record.reused_tokens:,} of {record.prompt_tokens:,}")
        assert page.locator("#bar button").count() == len(record.segments)
        told = mmcache("explain", answer["id"], "--url", server.url, "--api-key", KEY)
        assert f"{record.reused_tokens} of {record.prompt_tokens} prompt tokens reused" in told.stdout
    assert records(server)["records"][-1]["reused_tokens"] > 0
    page.screenshot(path=ARTEFACTS / "server.png", full_page=True)


def test_what_is_in_force_is_said_everywhere_alike(server: Server, page: "Page") -> None:
    """In the JSON, on the page, on /metrics and in the log, with where things are; the wish before it is no more."""
    told = httpx.get(f"{server.url}/mmcache/rooms", headers=AUTHORIZED).json()
    on = {room for room, said in told["rooms"].items() if said["state"] == "on"}
    assert {"identity", "observe", "features"} <= on
    assert told["rooms"]["image_spans"]["state"] == "unneeded"
    assert {"api", "engine 0", "worker 0 of engine 0"} == set(told["places"])
    assert told["places"]["worker 0 of engine 0"]["features"] == {"state": "on", "reason": ""}
    metrics = httpx.get(f"{server.url}/metrics").text
    for room, said in told["rooms"].items():
        assert re.search(rf'mmcache:room_info{{[^}}]*room="{room}"[^}}]*state="{said["state"]}"', metrics), room
    totals = httpx.get(f"{server.url}/mmcache/totals", headers=AUTHORIZED).json()
    assert {name: totals[name] for name in told} == told
    log = server.log_path.read_text(errors="replace")
    assert log.count("mmcache: wanted: requests recorded. What is so, the server says") == 1
    assert "mmcache: requests are recorded\n" in log
    assert "mmcache: features are kept: RAM (2.0GiB in each worker)\n" in log
    assert f"mmcache: the page is {server.url}/mmcache" in log


def test_nothing_private_is_told(server: Server, page: "Page") -> None:
    ask(server, [{"role": "user", "content": [picture("secret"), {"type": "text", "text": SECRET}]}])
    told = json.dumps(records(server))
    words = re.findall(r"\w{6,}", SECRET)
    assert not [word for word in words if word in told]
    assert "base64" not in told


def test_explain_says_what_is_wrong(server: Server) -> None:
    assert_one_line(mmcache("explain", "--url", server.url), "the API key is missing")
    assert_one_line(mmcache("explain", "none", "--url", server.url, "--api-key", KEY), "no record of request 'none'")


def test_the_metrics_name_every_outcome_of_the_dashboard(server: Server) -> None:
    dashboard = json.loads((ARTEFACTS.parents[1] / "docs" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 5
    metrics = httpx.get(f"{server.url}/metrics").text
    for name in {name for query in queries for name in re.findall(r"(?:mmcache|vllm):\w+", query)}:
        assert f"\n{name}" in metrics, name
    labels = {label for query in queries for label in re.findall(r"by \((\w+)\)", query)}
    assert labels == {"reason", "features", "outcome"}
    for label in labels:
        assert f'{label}="' in metrics


def test_z_server_gone(server: Server, page: "Page") -> None:
    """The last one: it stops the server."""
    from playwright.sync_api import expect

    page.goto(f"{server.url}/mmcache")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_class("live")
    server.process.terminate()  # as an operator does: the server ends its engine; in a group the engine may go first
    server.process.wait(60)
    stop(server.process)
    assert "Traceback" not in server.log_path.read_text(errors="replace")
    expect(page.locator("#status")).to_contain_text("The server does not answer", timeout=20000)
    assert page.locator("#list li").count() > 0
    page.problems.clear()  # type: ignore[attr-defined]
    assert_one_line(mmcache("explain", "--url", server.url, "--api-key", KEY), "no answer from")


def test_only_where_the_operator_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own rule, with vLLM's own loader; and what `mmcache serve --observe` sets."""
    from argparse import Namespace

    from fastapi import FastAPI
    from vllm.plugins.endpoint_plugins.interface import attach_endpoint_plugins

    from vllm_mmcache.cli.serve import observe_requests
    from vllm_mmcache.errors import EnvironmentProblem

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
