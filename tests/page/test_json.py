# SPDX-License-Identifier: Apache-2.0
"""The JSON below /mmcache and the page's headers, over HTTP; and `mmcache explain` against it and against a file."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.test_commands import COMMAND, assert_one_line, mmcache
from tests.page.app import EXAMPLES, IN_FORCE, Server, add, filled
from vllm_mmcache.observe.schema import MEANINGS, from_json, to_json
from vllm_mmcache.observe.summary import summary

KEY = "a key of this server"
OTHER = "another key of it"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    serving = Server(filled(EXAMPLES), KEY, OTHER)
    yield serving
    serving.stop()


def get(server: Server, path: str, key: str | None = KEY) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{server.url}/mmcache{path}", headers=headers, follow_redirects=True)


def body(server: Server, path: str) -> Any:
    answer = get(server, path)
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


def test_records(server: Server) -> None:
    assert body(server, "/records")["records"] == [summary(record) for record in EXAMPLES]
    assert [r["id"] for r in body(server, "/records?limit=2")["records"]] == [r.id for r in EXAMPLES[-2:]]
    assert [from_json(given) for given in body(server, "/records?full=1")["records"]] == EXAMPLES
    for record in EXAMPLES:
        assert from_json(body(server, f"/records/{record.id}")) == record
        facts = summary(record)
        assert sum(facts["missed_tokens"].values()) + facts["reused_tokens"] == facts["prompt_tokens"]
    assert body(server, "/totals")["totals"]["requests"] == len(EXAMPLES)
    assert set(body(server, "/totals")["meanings"]) == set(MEANINGS)
    assert {name: body(server, "/totals")[name] for name in IN_FORCE} == body(server, "/rooms") == IN_FORCE


def test_cursor() -> None:
    serving = Server(filled(EXAMPLES[:3]))
    cursor = body(serving, "/records")["cursor"]
    start = time.monotonic()
    assert body(serving, f"/records?since={cursor}&wait=0.5") == {"records": [], "cursor": cursor}
    assert time.monotonic() - start > 0.4  # held while there was nothing
    assert serving.store is not None
    add(serving.store, EXAMPLES[3])
    start = time.monotonic()
    news = body(serving, f"/records?since={cursor}&wait=2")
    assert time.monotonic() - start < 1.9  # not held
    assert [record["id"] for record in news["records"]] == [EXAMPLES[3].id]
    assert len(body(serving, "/records?since=of-another-server")["records"]) == 4
    serving.stop()


@pytest.mark.parametrize(
    "path", ["/records", "/records?since=x", f"/records/{EXAMPLES[0].id}", "/records/none", "/totals", "/rooms"]
)
def test_the_key(server: Server, path: str) -> None:
    for key in (None, "wrong", KEY + "x", KEY[:-1]):
        answer = get(server, path, key)
        assert answer.status_code == 401
        assert answer.json() == {"error": "the server's API key is missing or wrong"}
    assert httpx.get(f"{server.url}/mmcache{path}", headers={"Authorization": f"Basic {KEY}"}).status_code == 401
    assert get(server, path, OTHER).status_code == get(server, path).status_code != 401


def test_the_page_has_nothing_private_and_nothing_from_outside(server: Server) -> None:
    for path in ("", "/", "/page.js", "/page.css"):
        answer = get(server, path, key=None)
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "://" not in answer.text
        assert not any(record.id in answer.text for record in EXAMPLES)


@pytest.mark.parametrize("query", ["limit=x", "limit=-1", "wait=nan", "limit=inf"])
def test_wrong_numbers(server: Server, query: str) -> None:
    answer = get(server, f"/records?{query}")
    assert answer.status_code == 400
    assert query in answer.json()["error"]


def test_nothing_is_recorded() -> None:
    serving = Server(None)
    assert body(serving, "/rooms") == IN_FORCE
    assert get(serving, "/totals").status_code == 503
    assert get(serving, "/records").status_code == 503
    assert "--observe" in get(serving, "/records").json()["error"]
    assert_one_line(mmcache("explain", "--url", serving.url), "nothing is recorded")
    serving.stop()


@pytest.fixture(scope="module")
def record_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "records.jsonl"
    path.write_text("".join(json.dumps(to_json(record)) + "\n" for record in EXAMPLES))
    return path


def test_explain(server: Server, record_file: Path) -> None:
    record = EXAMPLES[3]
    for source in (["--url", f"{server.url}/v1", "--api-key", KEY], ["--file", str(record_file)]):
        listed = mmcache("explain", *source, "--last", "3")
        assert (listed.returncode, listed.stderr) == (0, "")
        assert [line.split()[-1] for line in listed.stdout.splitlines()[1:]] == [r.id for r in EXAMPLES[-3:]]
        as_json = mmcache("explain", *source, "--json")
        assert [from_json(json.loads(line)) for line in as_json.stdout.splitlines()] == EXAMPLES
        one = mmcache("explain", record.id, *source)
        assert one.returncode == 0
        assert f"{record.reused_tokens} of {record.prompt_tokens} prompt tokens reused" in one.stdout
        assert all(miss.text in one.stdout for miss in record.misses)
        assert from_json(json.loads(mmcache("explain", record.id, *source, "--json").stdout)) == record


def heed_interrupts() -> None:
    """A shell's background job, which the tests may be, ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("kind", ["server", "file"])
def test_explain_follows(kind: str, tmp_path: Path) -> None:
    serving = Server(filled(EXAMPLES[:2]))
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(to_json(record)) + "\n" for record in EXAMPLES[:2]))
    source = ["--url", serving.url] if kind == "server" else ["--file", str(path)]
    with subprocess.Popen(
        [*COMMAND, "explain", "-f", *source],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    ) as following:
        assert following.stdout is not None
        lines = [following.stdout.readline().split()[-1] for _ in range(3)]
        assert lines[1:] == [record.id for record in EXAMPLES[:2]]
        assert serving.store is not None
        add(serving.store, EXAMPLES[2])
        with path.open("a") as file:
            file.write(json.dumps(to_json(EXAMPLES[2])) + "\n")
        assert following.stdout.readline().split()[-1] == EXAMPLES[2].id
        os.kill(following.pid, signal.SIGINT)
        assert following.wait(10) == 130
    serving.stop()


def test_explain_says_what_is_wrong(server: Server, record_file: Path, tmp_path: Path) -> None:
    url = ["--url", server.url]
    assert_one_line(mmcache("explain", *url), "the API key is missing", "--api-key")
    assert_one_line(mmcache("explain", *url, "--api-key", "wrong"), "the API key is not the server's")
    assert_one_line(mmcache("explain", "none", *url, VLLM_API_KEY=KEY), "no record of request 'none'")
    assert_one_line(mmcache("explain", "none", "--file", str(record_file)), "no record of request 'none'")
    assert_one_line(mmcache("explain", "--url", "http://127.0.0.1:9"), "no answer from http://127.0.0.1:9", "--url")
    assert_one_line(mmcache("explain", "--url", "no address"), "no answer from")
    assert_one_line(mmcache("explain", "--url", f"{server.url}/elsewhere"), "has no /mmcache", "--observe")
    assert_one_line(mmcache("explain", *url, "--file", "x"), "one of the two")
    assert_one_line(mmcache("explain", "x", "-f", *url), "leave out the id")
    assert_one_line(mmcache("explain", "--file", str(tmp_path / "none")), "No such file", "MMCACHE_OBSERVE_FILE")
    broken = tmp_path / "broken.jsonl"
    for line in ("{", '{"id": 3}', "[]", json.dumps(to_json(EXAMPLES[0]) | {"format": 2})):
        broken.write_text(record_file.read_text().splitlines()[0] + f"\n{line}\n")
        assert_one_line(mmcache("explain", "--file", str(broken)), "broken.jsonl, line 2: not a record")
