# SPDX-License-Identifier: Apache-2.0
"""What goes over the wire, with httpx and httpx2, sync and async, before a server that knows and forgets ids."""

import asyncio
import concurrent.futures
import json
import threading
from typing import Any

import httpx
import httpx2
import pytest

from tests.unit.client.test_images import chat, encode, names, part
from tests.unit.components.image_extraction.test_extract import text_of
from vllm_mmcache.client import AsyncOnceTransport, OnceTransport, Sent

URL = "http://host/v1/chat/completions"
JSON = {"content-type": "application/json"}


class Wire:
    """Stands for httpx's transport and a server behind it: keeps what it is sent, refuses ids that it does not know."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.requests: list[Any] = []
        self.bytes_by_id: dict[str, Any] = {}
        self.refusal = 400
        self.lock = threading.Lock()
        self.transport = library.MockTransport(self.answer)

    def answer(self, request: Any) -> Any:
        self.requests.append(request)
        if not request.url.path.endswith("/chat/completions"):
            return self.library.Response(200, json={})
        with self.lock:  # nothing is forgotten between a look and its use
            for one in json.loads(request.content)["messages"][0]["content"]:
                if one["type"] == "image_url" and "uuid" in one:
                    if one["image_url"] is None and one["uuid"] not in self.bytes_by_id:
                        return self.library.Response(self.refusal, json={"error": "Cache miss for image at index 0"})
                    known = self.bytes_by_id.setdefault(one["uuid"], one["image_url"])
                    assert one["image_url"] in (None, known)
        return self.library.Response(200, json={})

    @property
    def sizes(self) -> list[int]:
        return [len(request.content) for request in self.requests]


def post(wire: Wire, transport: OnceTransport, request: Any, url: str = URL, **headers: str) -> Any:
    with wire.library.Client(transport=transport) as client:
        return client.post(url, content=encode(request), headers={**JSON, **headers})


@pytest.fixture(params=[httpx, httpx2])
def wire(request: pytest.FixtureRequest) -> Wire:
    return Wire(request.param)


A, B = text_of("a", 20_000), text_of("b", 20_000)


def test_once(wire: Wire) -> None:
    transport = OnceTransport(wire.transport)
    for number in range(3):
        assert post(wire, transport, chat(part(A), seed=number)).status_code == 200
    assert post(wire, transport, chat(part(A), part(B))).status_code == 200
    first, second, third, fourth = wire.sizes
    assert first > 20_000
    assert max(second, third) < 500
    assert 20_000 < fourth < 30_000  # B alone
    assert all(int(request.headers["content-length"]) == len(request.content) for request in wire.requests)


def test_forgotten_images_are_sent_again(wire: Wire) -> None:
    transport = OnceTransport(wire.transport)
    post(wire, transport, chat(part(A), part(B)))
    wire.bytes_by_id.clear()
    assert post(wire, transport, chat(part(A), part(B))).status_code == 200
    assert [size > 40_000 for size in wire.sizes] == [True, False, True]
    assert post(wire, transport, chat(part(A), part(B))).status_code == 200
    assert len(wire.sizes) == 4


@pytest.mark.parametrize("refusal", [400, 422, 500])
def test_what_else_a_gateway_refuses_with(wire: Wire, refusal: int) -> None:
    """Whatever the bodies are that it knows: the caller sees the answer to the whole request."""
    transport, wire.refusal = OnceTransport(wire.transport), refusal
    for _ in range(2):
        wire.bytes_by_id.clear()
        assert post(wire, transport, chat(part(A))).status_code == 200


def test_a_server_that_forgets_once_is_trusted_again(wire: Wire) -> None:
    transport = OnceTransport(wire.transport)
    post(wire, transport, chat(part(A)))
    wire.bytes_by_id.clear()
    for _ in range(3):
        post(wire, transport, chat(part(A)))
    assert [size > 20_000 for size in wire.sizes] == [True, False, True, False, False]


def test_behind_servers_that_take_turns_images_go_whole_for_a_while(wire: Wire) -> None:
    """The names are refused twice, then not tried for two requests, then for four, up to 64."""
    transport = OnceTransport(wire.transport)
    num_requests = 400
    for _ in range(num_requests):
        assert post(wire, transport, chat(part(A))).status_code == 200
        wire.bytes_by_id.clear()
    refused = len(wire.requests) - num_requests
    assert refused == 12
    assert sum(wire.sizes) < 1.01 * num_requests * max(wire.sizes)


def test_a_refusal_of_the_whole_request_is_no_miss(wire: Wire) -> None:
    sent = Sent()
    post(wire, OnceTransport(wire.transport, sent=sent), chat(part(A)))
    refusing = wire.library.MockTransport(lambda request: wire.library.Response(400, json={"error": "no"}))
    for _ in range(5):
        assert post(wire, OnceTransport(refusing, sent=sent), chat(part(A))).status_code == 400
    post(wire, OnceTransport(wire.transport, sent=sent), chat(part(A)))
    assert wire.sizes[-1] < 500


def test_a_conversation_has_a_header_of_its_own(wire: Wire) -> None:
    """Also when the whole is sent after a refusal; other tenants and conversations have others."""
    transport = OnceTransport(wire.transport)
    post(wire, transport, chat(part(A)))
    post(wire, transport, chat(part(A), part(B)))
    wire.bytes_by_id.clear()
    post(wire, transport, chat(part(B)))
    assert len(wire.requests) == 4
    post(wire, transport, chat(part(A)), authorization="Bearer two")
    post(wire, transport, chat(part(A), cache_salt="salt"))
    post(wire, transport, chat(part(text_of("c", 20_000))))
    found = [request.headers["x-session-id"] for request in wire.requests]
    assert found[:4] == [found[0]] * 4
    assert len(set(found)) == 4


def test_a_header_of_the_callers_own_stays(wire: Wire) -> None:
    transport = OnceTransport(wire.transport, affinity=["X-Session-Id", "x-smg-routing-key"])
    post(wire, transport, chat(part(A)), **{"x-session-id": "mine"})
    (request,) = wire.requests
    assert request.headers.get_list("x-session-id") == ["mine"]
    assert len(request.headers["x-smg-routing-key"]) == 32


def test_without_affinity_there_is_no_header(wire: Wire) -> None:
    transport = OnceTransport(wire.transport, affinity=None)
    post(wire, transport, chat(part(A)))
    post(wire, OnceTransport(wire.transport), chat())
    assert not any("x-session-id" in request.headers for request in wire.requests)


def test_async(wire: Wire) -> None:
    transport = AsyncOnceTransport(wire.transport)

    async def turns() -> None:
        async with wire.library.AsyncClient(transport=transport) as client:
            for _ in range(2):
                assert (await client.post(URL, content=encode(chat(part(A))), headers=JSON)).status_code == 200
            wire.bytes_by_id.clear()
            assert (await client.post(URL, content=encode(chat(part(A))), headers=JSON)).status_code == 200

    asyncio.run(turns())
    assert [size > 20_000 for size in wire.sizes] == [True, False, False, True]


def test_a_refused_request_is_not_remembered(wire: Wire) -> None:
    refusing = wire.library.MockTransport(lambda request: wire.library.Response(400, json={"error": "no"}))
    sent = Sent()
    answer = post(wire, OnceTransport(refusing, sent=sent), chat(part(A)))
    assert (answer.status_code, answer.json(), len(sent)) == (400, {"error": "no"}, 0)


def test_servers_users_and_models_apart(wire: Wire) -> None:
    transport = OnceTransport(wire.transport)
    for _ in range(2):
        post(wire, transport, chat(part(A)))
        post(wire, transport, chat(part(A)), url="http://other/v1/chat/completions")
        post(wire, transport, chat(part(A)), authorization="Bearer one")
        post(wire, transport, chat(part(A)), authorization="Bearer two")
        post(wire, transport, chat(part(A), cache_salt="salt"))
        post(wire, transport, chat(part(A)) | {"model": "other"})
    assert [size > 20_000 for size in wire.sizes] == [True] * 6 + [False] * 6


@pytest.mark.parametrize("enabled", [True, False])
def test_other_requests_pass_untouched(wire: Wire, enabled: bool) -> None:
    transport = OnceTransport(wire.transport, enabled=enabled)
    body = encode(chat(part(A)))
    cases: list[tuple[str, str, dict[str, str], Any]] = [
        ("POST", "http://host/v1/embeddings", JSON, body),
        ("PUT", URL, JSON, body),
        ("POST", URL, {"content-type": "text/plain"}, body),
        ("POST", URL, {**JSON, "content-encoding": "identity"}, body),
        ("POST", URL, JSON, encode(chat())),
    ]
    if not enabled:
        cases += [("POST", URL, JSON, body)] * 2
    with wire.library.Client(transport=transport) as client:
        for method, url, headers, content in cases:
            client.request(method, url, headers=headers, content=content)
    assert [request.content for request in wire.requests] == [case[3] for case in cases]


def test_a_body_made_while_it_is_sent_passes(wire: Wire) -> None:
    body = encode(chat(part(A)))
    with wire.library.Client(transport=OnceTransport(wire.transport)) as client:
        client.post(URL, content=iter([body[:1000], body[1000:]]), headers=JSON)
    assert wire.requests[0].content == body


def test_a_body_that_was_read_before_it_is_sent(wire: Wire) -> None:
    """Its length is said once, not beside what says that nobody knows it."""
    body = encode(chat(part(A)))
    hooks = {"request": [lambda request: request.read()]}
    with wire.library.Client(transport=OnceTransport(wire.transport), event_hooks=hooks) as client:
        for _ in range(2):
            client.post(URL, content=iter([body[:1000], body[1000:]]), headers=JSON)
    assert [size > 20_000 for size in wire.sizes] == [True, False]
    for request in wire.requests:
        assert "transfer-encoding" not in request.headers
        assert int(request.headers["content-length"]) == len(request.content)


def test_errors_of_the_connection_pass(wire: Wire) -> None:
    def fail(request: Any) -> Any:
        raise wire.library.ConnectError("nobody there")

    with pytest.raises(wire.library.ConnectError, match="nobody there"):
        post(wire, OnceTransport(wire.library.MockTransport(fail)), chat(part(A)))


def test_the_memory_is_bounded(wire: Wire) -> None:
    sent = Sent(max_images=2)
    transport = OnceTransport(wire.transport, sent=sent)
    for text in (A, B, text_of("c", 20_000)):
        post(wire, transport, chat(part(text)))
    assert len(sent) == 2
    post(wire, transport, chat(part(A)))
    post(wire, transport, chat(part(text_of("c", 20_000))))
    assert [size > 20_000 for size in wire.sizes] == [True] * 4 + [False]


def test_many_threads(wire: Wire) -> None:
    """The server checks that an id always comes with the same bytes."""
    transport = OnceTransport(wire.transport, sent=Sent(max_images=3))
    texts = [text_of(f"{number}", 5000) for number in range(6)]

    def ask(number: int) -> int:
        if number % 50 == 49:
            with wire.lock:
                wire.bytes_by_id.clear()
        return post(wire, transport, chat(*(part(texts[(number + one) % 6]) for one in range(2)))).status_code

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(ask, range(400)))
    assert statuses.count(200) == len(statuses)
    for request in wire.requests:
        assert all(names(json.loads(request.content))[:2])
