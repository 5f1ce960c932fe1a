# SPDX-License-Identifier: Apache-2.0
"""Every endpoint that takes images knows its request's tenant, wherever tenants are found, and refuses to do without.

docs/identity.md has the table of endpoints; a test compares it with ENDPOINTS.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from mmcache_tools.harness.server import CPU_ARGS, serve
from mmcache_tools.zoo import build_cached

from tests.support import files
from tests.support.sizes import larger
from tests.support.target import MODEL, MODES, Target, fresh, picture, url_of

pytestmark = [pytest.mark.engine, pytest.mark.answers]

DOCS = Path(__file__).parents[3] / "docs" / "identity.md"
ARGS = (*CPU_ARGS, "--served-model-name", MODEL, "--enable-prefix-caching", "--enable-prompt-tokens-details")
KINDS = {
    "generate": (*ARGS, "--enable-scale-out"),
    "embed": (*ARGS, "--runner", "pooling", "--convert", "embed"),
}
ENV = {"MMCACHE_REQUIRE_TENANT": "1", "VLLM_ENABLE_COHERE_API": "1"}
# Stock knows of no tenant in a header or key: what it shares there shows that these tests can tell.
SIDES = [("plugin", mode) for mode in MODES] + [("stock", mode) for mode in MODES]


def requests(image: bytes, token_ids: list[int]) -> dict[str, dict[str, dict[str, Any]]]:
    """A request about an image, by what the model is for and by endpoint."""
    url = url_of(image)
    part = {"type": "image_url", "image_url": {"url": url}}
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    text = {"type": "text", "text": "What?"}
    messages = [{"role": "user", "content": [part, text]}]
    block = {"type": "image", "source": source}
    blocks = [{"role": "user", "content": [block, text]}]
    input_image = {"type": "input_image", "detail": "auto", "image_url": url}
    spoken = [{"role": "user", "content": [input_image]}]
    return {
        "generate": {
            "/v1/chat/completions": {"messages": messages, "max_tokens": 1},
            "/v1/chat/completions/batch": {"messages": [messages], "max_tokens": 1},
            "/v1/chat/completions/render": {"messages": messages},
            "/v1/responses": {"input": spoken, "max_output_tokens": 1},
            "/v1/responses/render": {"input": spoken},
            "/v1/messages": {"messages": blocks, "max_tokens": 1},
            "/v1/messages/count_tokens": {"messages": blocks},
            "/v1/messages/render": {"messages": blocks, "max_tokens": 1},
            "/cohere/v2/chat": {"messages": messages, "max_tokens": 1},
            "/cohere/v2/chat/render": {"messages": messages},
            "/tokenize": {"messages": messages},
            "/invocations": {"messages": messages, "max_tokens": 1},
            "/inference/v1/generate": {
                "token_ids": token_ids, "content_parts": [{"type": "image_url", "url": url}],
                "sampling_params": {"max_tokens": 1},
            },
        },
        "embed": {
            "/v1/embeddings": {"messages": messages},
            "/v2/embed": {"images": [url], "embedding_types": ["float"]},
            "/pooling": {"messages": messages, "task": "embed"},
            "/score": {"queries": {"content": [part]}, "documents": {"content": [text]}},
            "/v1/score": {"queries": {"content": [part]}, "documents": {"content": [text]}},
            "/rerank": {"query": "What?", "documents": {"content": [part]}},
        },
    }  # fmt: skip


ENDPOINTS = {kind: list(found) for kind, found in requests(b"", []).items()}
# What needs no engine leaves nothing in its KV cache.
WITHOUT_ENGINE = re.compile(r"/render$|count_tokens$|/tokenize$")


@pytest.fixture(scope="module", params=ENDPOINTS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=larger if one[0] == "stock" else (), id="-".join(one)) for one in SIDES],
)
def side(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(scope="module")
def server(kind: str, side: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    name, mode = side
    model = build_cached("qwen3-vl", tmp_path_factory.mktemp("zoo"))
    log_path = tmp_path_factory.mktemp("log") / "log"
    env = {**ENV, "MMCACHE_TENANT_FROM": MODES[mode]} if name == "plugin" else {**ENV, "MMCACHE_DISABLE": "1"}
    if name == "stock":
        del env["MMCACHE_REQUIRE_TENANT"]
    with serve(model, log_path=log_path, env=env, args=KINDS[kind]) as running:
        yield Target(running.url, mode)


def post(server: Target, path: str, body: dict[str, Any], tenant: str | None, **more: Any) -> httpx.Response:
    """One request of a tenant, named as this server wants it."""
    named = {"cache_salt": tenant} if tenant is not None and server.mode == "body" else {}
    return httpx.post(
        server.url + path, json={"model": MODEL, **body, **named, **more}, headers=server.headers(tenant), timeout=60
    )


def asked(server: Target, kind: str, path: str, image: bytes) -> dict[str, Any]:
    tokens = prompt_ids(server) if path == "/inference/v1/generate" else []
    return requests(image, tokens)[kind][path]


def prompt_ids(server: Target) -> list[int]:
    """Tokens of a prompt with one placeholder that is not expanded yet."""
    text = "<|vision_start|><|image_pad|><|vision_end|>What?"
    answer = httpx.post(f"{server.url}/tokenize", json={"model": MODEL, "prompt": text}, timeout=60)
    found: list[int] = answer.raise_for_status().json()["tokens"]
    return found


def each_endpoint(server: Target, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in ENDPOINTS[kind]:
        yield path, asked(server, kind, path, files.saved(picture(fresh(path), (96, 96)), "PNG", compress_level=0))


def test_tenants_know_their_own_images(server: Target, kind: str, side: tuple[str, str]) -> None:
    """One decodes it once; what another has decoded is not known to it. Neither is another's KV."""
    known, reused = {}, {}
    for path, body in each_endpoint(server, kind):
        decoded, hits = [], []
        for name in ("a", "a", "b", "b"):
            before = server.counters()
            answer = post(server, path, body, f"{path.replace('/', '-')}-{name}")
            assert answer.status_code == 200, (path, answer.text)
            after = server.counters()
            decoded.append(after.get("mmcache:images_decoded", 0) - before.get("mmcache:images_decoded", 0))
            hits.append(after["vllm:prefix_cache_hits"] - before["vllm:prefix_cache_hits"] > 0)
        known[path], reused[path] = decoded, hits
    shares = [path for path, hits in reused.items() if hits[2]]
    if side[0] == "plugin":
        assert known == {path: [1, 0, 1, 0] for path in known}
        assert reused == {
            path: [False, True, False, True] if not WITHOUT_ENGINE.search(path) else [False] * 4 for path in reused
        }
    print(f"{side}: {kind}: another tenant's KV is reused at {len(shares)} of {len(reused)} endpoints: {shares}")
    assert bool(shares) == (side[0] == "stock"), "there, not every endpoint has a field for a salt"


def plugin_alone(side: tuple[str, str]) -> None:
    if side[0] == "stock":
        pytest.skip("stock knows of no tenant to miss")


MISSING = {"body": "cache_salt", "header": "x-tenant", "api_key": "API key"}


def test_without_a_tenant_images_are_refused(server: Target, kind: str, side: tuple[str, str]) -> None:
    """In the shape of each protocol, with the name of what is missing."""
    plugin_alone(side)
    for path, body in each_endpoint(server, kind):
        answer = post(server, path, body, None)
        assert answer.status_code == 400, (path, answer.text)
        assert MISSING[server.mode] in message(path, answer), (path, answer.text)
        assert post(server, path, body, "somebody").status_code == 200, path


def message(path: str, answer: httpx.Response) -> str:
    """The message of an error, where the clients of this endpoint look for it."""
    found = answer.json()
    if path.startswith("/cohere/v2"):
        return str(found["message"])
    if path.startswith("/v1/messages") and not path.endswith("/render"):
        assert found["type"] == "error"
    return str(found["error"]["message"])


def test_two_tenants_in_one_request_are_refused(server: Target, kind: str, side: tuple[str, str]) -> None:
    """Else a client could name another tenant beside its own, by name or by the salt that is made of it."""
    plugin_alone(side)
    if server.mode == "body":
        pytest.skip("here the body alone names a tenant")
    from vllm_mmcache.base.tenant import parse_source

    victim = parse_source(MODES[server.mode]).salt_of("victim")
    for path, body in each_endpoint(server, kind):
        for forged in ("victim", victim, "", 7, ["victim"]):
            answer = post(server, path, body, "attacker", cache_salt=forged)
            assert answer.status_code == 400, (path, forged, answer.text)
            assert "cache_salt" in message(path, answer)
            assert "attacker" not in answer.text
        assert post(server, path, body, None, cache_salt="victim").status_code == 400
        assert post(server, path, body, "attacker", cache_salt="attacker").status_code == 200


def test_a_salt_that_is_none_is_refused(server: Target, kind: str, side: tuple[str, str]) -> None:
    """Also where vLLM's own model of the request has no such field, and would pass over it."""
    plugin_alone(side)
    if server.mode != "body":
        pytest.skip("here the body names no tenant")
    for path, body in each_endpoint(server, kind):
        for wrong in ("", 7, ["a"], "a/b", "\0", "s" * 2000):
            answer = post(server, path, body, None, cache_salt=wrong)
            assert answer.status_code == 400, (path, wrong, answer.text)
            assert "cache_salt" in answer.text


def wrong_headers(name: str) -> dict[str, tuple[list[tuple[str, str]], str]]:
    """Headers of requests, and what is said of them."""
    value = "Bearer {}" if name == "Authorization" else "{}"
    given = name.lower()
    wrong = {
        "empty": ([(name, "")], f"'{given}' is empty"),
        "repeated": ([(name, value.format("a")), (name, value.format("b"))], f"'{given}' was sent 2 times"),
        "repeated alike": ([(name, value.format("a"))] * 2, f"'{given}' was sent 2 times"),
        "long": ([(name, value.format("a" * 8200))], f"'{given}' has {len(value.format('a' * 8200))} bytes"),
    }
    if name == "Authorization":
        wrong["two keys"] = ([(name, "Bearer a"), ("x-api-key", "b")], "two API keys")
    return wrong


def test_headers_that_name_no_tenant(server: Target, kind: str, side: tuple[str, str]) -> None:
    plugin_alone(side)
    if server.mode == "body":
        pytest.skip("here no header names a tenant")
    wrong = wrong_headers("X-Tenant" if server.mode == "header" else "Authorization")
    for path, body in each_endpoint(server, kind):
        for headers, said in wrong.values():
            answer = httpx.post(server.url + path, json={"model": MODEL, **body}, headers=headers, timeout=60)
            assert answer.status_code == 400, (path, answer.text)
            assert said in message(path, answer)
    huge = httpx.post(server.url + path, json=body, headers=[("X-Tenant", "a" * 2**20)], timeout=60)
    assert huge.status_code in (400, 431)  # the server's HTTP reader is before us


def test_text_needs_no_tenant(server: Target, kind: str) -> None:
    if kind == "generate":
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        assert post(server, "/v1/chat/completions", body, None).status_code == 200


def test_text_of_tenants_is_apart_too(server: Target, kind: str, side: tuple[str, str]) -> None:
    """vLLM's own KV has the tenant's salt, though no client has sent one."""
    if kind != "generate":
        pytest.skip("no text here")
    body = {"prompt": f"{fresh('text')} " * 30, "max_tokens": 1}
    hits = []
    for name in ("a", "a", "b"):
        before = server.counters()["vllm:prefix_cache_hits"]
        assert post(server, "/v1/completions", body, name).status_code == 200
        hits.append(server.counters()["vllm:prefix_cache_hits"] - before > 0)
    assert hits == [False, True, side[0] == "stock" and side[1] != "body"]


def test_the_shape_of_the_refusal(server: Target, kind: str, side: tuple[str, str]) -> None:
    plugin_alone(side)
    path = ENDPOINTS[kind][0]
    error = post(server, path, asked(server, kind, path, files.good()["png"]), None).json()["error"]
    parameter = {"body": "cache_salt", "header": "x-tenant", "api_key": "authorization"}[server.mode]
    assert (error["type"], error["param"], error["code"]) == ("BadRequestError", parameter, 400)


def test_docs_list_them() -> None:
    section = DOCS.read_text().partition("## Endpoints")[2].partition("\n## ")[0]
    listed = [path for line in section.splitlines() if line.startswith("- ") for path in re.findall(r"`(/\S+)`", line)]
    assert sorted(listed) == sorted(path for paths in ENDPOINTS.values() for path in paths)
