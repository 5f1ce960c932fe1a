# SPDX-License-Identifier: Apache-2.0
"""Requests that a client pipelines on one connection: none inherits the salt of the one before it."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from vllm_mmcache import tenant
from vllm_mmcache.identity.layer import BeginAsNobody


async def salted(request: Request) -> JSONResponse:
    """As an endpoint whose requests may have a cache_salt: identity sets it once the body is read."""
    before = tenant.SALT.get()
    tenant.SALT.set((await request.json()).get("cache_salt"))
    return JSONResponse({"before": before, "salt": tenant.SALT.get()})


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
    middleware = [Middleware(BeginAsNobody)] if has_layer else []
    routes = [Route("/salted", salted, methods=["POST"]), Route("/tokenize", unsalted, methods=["POST"])]
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(Starlette(routes=routes, middleware=middleware), log_level="warning", http=http)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    yield int(listener.getsockname()[1])
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
