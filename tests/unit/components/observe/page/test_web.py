# SPDX-License-Identifier: Apache-2.0
"""The JSON below /mmcache and the page's headers, over HTTP."""

import hmac
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from tests.support.page_app import EXAMPLES, IN_FORCE, KEY, Server, add, filled
from vllm_mmcache.components.observe.page import web
from vllm_mmcache.components.observe.record.schema import FEATURE_MEANINGS, MEANINGS, from_json
from vllm_mmcache.components.observe.record.summary import summary


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    serving = Server(filled(EXAMPLES))
    yield serving
    serving.stop()


def get(server: Server, path: str, key: str | None = KEY) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{server.url}/mmcache{path}", headers=headers, follow_redirects=True, timeout=60)


def body(server: Server, path: str) -> Any:
    answer = get(server, path)
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


@pytest.mark.slow
def test_records(server: Server) -> None:
    assert body(server, "/records")["records"] == [summary(record) for record in EXAMPLES]
    assert [r["id"] for r in body(server, "/records?limit=2")["records"]] == [r.id for r in EXAMPLES[-2:]]
    assert [from_json(given) for given in body(server, "/records?full=1")["records"]] == EXAMPLES
    for record in EXAMPLES:
        assert from_json(body(server, f"/records/{record.id}")) == record
        facts = summary(record)
        assert sum(facts["missed_tokens"].values()) + facts["reused_tokens"] == facts["prompt_tokens"]
    assert body(server, "/totals")["totals"]["requests"] == len(EXAMPLES)
    assert set(body(server, "/totals")["meanings"]) == set(MEANINGS) | set(FEATURE_MEANINGS)
    assert {name: body(server, "/totals")[name] for name in IN_FORCE} == body(server, "/components") == IN_FORCE


def test_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = Server(filled(EXAMPLES[:3]))
    cursor = body(serving, "/records")["cursor"]
    start = time.monotonic()
    assert body(serving, f"/records?since={cursor}&wait=0.5") == {"records": [], "cursor": cursor}
    assert time.monotonic() - start > 0.4  # held while there was nothing
    assert serving.store is not None
    add(serving.store, EXAMPLES[3])
    monkeypatch.setattr(web, "MAX_WAIT_S", 3600.0)
    news = body(serving, f"/records?since={cursor}&wait=3600")  # not held: it comes before the client gives up
    assert [record["id"] for record in news["records"]] == [EXAMPLES[3].id]
    assert len(body(serving, "/records?since=0123abcd-7")["records"]) == 4
    serving.stop()


DATA = (
    "/records",
    "/records?since=x",
    "/records?id=x",
    f"/records/{EXAMPLES[0].id}",
    "/records/none",
    "/totals",
    "/components",
    "/rooms",
)
WRONG = (
    None, "", "Bearer", "Bearer wrong", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer  {KEY}", f"bearer\t{KEY}",
    f"Basic {KEY}", KEY, b"Bearer \xff\xfe", "Bearer caf\u00e9".encode(),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("path", DATA)
def test_the_key(server: Server, path: str) -> None:
    for header in WRONG:
        headers: Any = {} if header is None else {"Authorization": header}
        answer = httpx.get(f"{server.url}/mmcache{path}", headers=headers, timeout=60)
        assert answer.status_code == 401, header
        assert answer.json() == {"error": "the admin key is missing or wrong"}
    assert (
        httpx.get(f"{server.url}/mmcache{path}", headers={"Authorization": f"BEARER {KEY}"}, timeout=60).status_code
        != 401
    )
    assert get(server, path).status_code != 401


def test_keys_are_compared_in_constant_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As digests of one length, by hmac.compare_digest alone, whether the scheme is right or not."""
    compared: list[tuple[bytes, bytes]] = []
    original = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or original(a, b))
    for header in ("Bearer x", "Basic x", "", f"Bearer {KEY}"):
        httpx.get(f"{server.url}/mmcache/records", headers={"Authorization": header}, timeout=60)
    assert [(len(a), len(b)) for a, b in compared] == [(32, 32)] * 4


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


TAILS = ("\u00b2", "\u0663", "9" * 5000, "1 ", "1\n", "+1", "1_0", "\x00", "x", "")


@pytest.mark.parametrize("nonsense", ["x", "-1", *(f"TOKEN-{tail}" for tail in TAILS)])
def test_a_cursor_that_is_none(server: Server, nonsense: str) -> None:
    token, _, _ = body(server, "/records")["cursor"].partition("-")
    answer = get(server, "/records?" + urlencode({"since": nonsense.replace("TOKEN", token)}))
    assert answer.status_code == 400
    assert "is no cursor" in answer.json()["error"]
