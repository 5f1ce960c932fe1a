# SPDX-License-Identifier: Apache-2.0
"""The layer in a real HTTP server: it finds tenants in headers, and no request inherits another one's salt."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from vllm_mmcache.base import tenant
from vllm_mmcache.components.identity.middleware import FindTenant

pytestmark = pytest.mark.answers


async def salted(request: Request) -> JSONResponse:
    """As an endpoint whose requests may have a cache_salt: identity sets it once the body is read."""
    before = tenant.SALT.get()
    tenant.SALT.set((await request.json()).get("cache_salt"))
    return JSONResponse({"before": before, "salt": tenant.SALT.get()})


async def anything(request: Request) -> JSONResponse:
    return JSONResponse({"salt": tenant.SALT.get()})


async def unsalted(request: Request) -> JSONResponse:
    """As /tokenize, whose requests have none."""
    await request.body()
    return JSONResponse({"before": tenant.SALT.get(), "salt": tenant.SALT.get()})


@pytest.fixture(params=["h11", "httptools"])
def http(request: pytest.FixtureRequest) -> str:
    if request.param == "httptools":
        pytest.importorskip("httptools")
    return str(request.param)


@pytest.fixture(params=[True, False])
def has_layer(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def port(http: Any, has_layer: bool) -> Iterator[int]:
    with serving(http, [Middleware(FindTenant, source=tenant.TenantSource())] if has_layer else []) as found:
        yield found


@contextlib.contextmanager
def serving(http: Any, middleware: list[Middleware]) -> Iterator[int]:
    """The port of a server that tells the salts it sees."""
    routes = [
        Route("/salted", salted, methods=["POST"]),
        Route("/tokenize", unsalted, methods=["POST"]),
        Route("/{path:path}", anything, methods=["GET", "POST"]),
    ]
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(Starlette(routes=routes, middleware=middleware), log_level="warning", http=http)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    try:
        yield int(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(60)


def pipelined(port: int, *requests: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to requests that are all sent before the first is answered."""
    sent = b""
    for number, (path, given) in enumerate(requests, 1):
        body = json.dumps(given).encode()
        end = "Connection: close\r\n" if number == len(requests) else ""
        sent += f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{end}\r\n".encode() + body
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(sent)
        got = b""
        while part := connection.recv(65536):
            got += part
    return [json.loads(answer.partition(b"\r\n\r\n")[2]) for answer in got.split(b"HTTP/1.1 200 OK")[1:]]


def test_a_pipelined_request_begins_as_nobody(port: int, has_layer: bool) -> None:
    """Without the layer it works with the salt of the one before it, which shows that this test can tell."""
    answers = pipelined(port, ("/salted", {"cache_salt": "of a tenant"}), ("/tokenize", {}), ("/salted", {}))
    assert [answer["salt"] for answer in answers] == ["of a tenant", None if has_layer else "of a tenant", None]
    assert [answer["before"] is None for answer in answers] == [True, has_layer, has_layer]


BY_HEADER = tenant.parse_source("header:X-Tenant")


def test_headers_name_tenants(http: str) -> None:
    """On the wire, where names of headers have any case. A GET, as of /health, needs none and is never refused."""
    with serving(http, [Middleware(FindTenant, source=BY_HEADER)]) as port, httpx.Client(timeout=60) as client:
        url = f"http://127.0.0.1:{port}"
        for name in ("X-Tenant", "x-tenant", "X-TENANT"):
            found = client.post(f"{url}/tokenize", headers={name: "acme"}).json()
            assert found["salt"] == BY_HEADER.salt_of("acme")
        assert client.post(f"{url}/tokenize").json()["salt"] is None
        twice = [("X-Tenant", "a"), ("x-tenant", "a")]
        assert client.get(f"{url}/health", headers=twice).json() == {"salt": None}
        for path, shape in (("/v1/chat/completions", "openai"), ("/v1/messages", "anthropic")):
            refused = client.post(url + path, headers=twice)
            assert refused.status_code == 400
            body = refused.json()
            assert "'x-tenant' was sent 2 times" in body["error"]["message"]
            if shape == "openai":
                assert (body["error"]["type"], body["error"]["param"], body["error"]["code"]) == (
                    "BadRequestError", "x-tenant", 400,
                )  # fmt: skip
            else:
                assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")


def test_a_header_of_a_megabyte(http: str) -> None:
    """The HTTP reader or the layer refuses it; the server lives on."""
    with serving(http, [Middleware(FindTenant, source=BY_HEADER)]) as port, httpx.Client(timeout=60) as client:
        url = f"http://127.0.0.1:{port}/tokenize"
        with contextlib.suppress(httpx.TransportError):  # the reader may close before it has read all
            assert client.post(url, headers={"X-Tenant": "a" * 2**20}).status_code in (400, 431)
        assert client.post(url, headers={"X-Tenant": "a"}).json()["salt"] == BY_HEADER.salt_of("a")


def test_pipelined_requests_of_two_tenants(http: str) -> None:
    with serving(http, [Middleware(FindTenant, source=BY_HEADER)]) as port:
        sent = b""
        for number, name in enumerate((b"X-Tenant: a\r\n", b"", b"X-Tenant: b\r\n", b"")):
            end = b"Connection: close\r\n" if number == 3 else b""
            sent += b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n" + name + end + b"\r\n{}"
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(sent)
            got = b""
            while part := connection.recv(65536):
                got += part
    salts = [json.loads(answer.partition(b"\r\n\r\n")[2])["salt"] for answer in got.split(b"HTTP/1.1 200 OK")[1:]]
    assert salts == [BY_HEADER.salt_of("a"), None, BY_HEADER.salt_of("b"), None]
