# SPDX-License-Identifier: Apache-2.0
"""The ASGI layer: receives the body, has its images lifted, and hands the application the short body.

API server process, event loop; bodies are worked on in a thread. The layer is the innermost one, so that a refused
client costs nothing and all others see the body as it came. A 4xx answer may repeat or measure the input: then the
application gets the same request once more as it came, and that answer is sent. It must never fail a request itself.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vllm_mmcache import events
from vllm_mmcache.body import references
from vllm_mmcache.body.lift import lift
from vllm_mmcache.body.scan import MIN_TEXT_BYTES, NEEDLE
from vllm_mmcache.body.shapes import WALKERS, Walker

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class LiftImages:
    """Pure ASGI. may_lift is asked for each request that may hold images, by its scope and its path."""

    def __init__(self, app: App, may_lift: Callable[[Scope, str], bool]) -> None:
        self.app = app
        self.may_lift = may_lift

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        walker = self._walker(scope)
        if walker is None:
            return await self.app(scope, receive, send)
        messages = await _receive_all(receive)
        if messages[-1]["type"] != "http.request":  # the client has gone: let the application find out
            return await self.app(scope, _again(messages, receive), send)
        body = b"".join([message.get("body", b"") for message in messages])
        del messages
        with events.BODY_SECONDS.seconds():
            lifted = await asyncio.to_thread(lift, body, walker) if NEEDLE in body else None
        if lifted is None:
            return await self.app(scope, _again(_one(body), receive), send)
        events.BYTES_LIFTED.add(lifted.num_bytes)
        events.IMAGES_LIFTED.add(len(lifted.payloads))
        before = dict(scope)
        answer = _Answer(send)
        with references.lend(lifted.payloads):
            await self.app(scope, _again(_one(lifted.body), receive), answer.send)
        if answer.refused:
            scope.clear()
            scope.update(before)
            await self.app(scope, _again(_one(body), receive), send)

    def _walker(self, scope: Scope) -> Walker | None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        walker = WALKERS.get(path)
        if walker is None or not _is_plain_json(scope) or not self.may_lift(scope, path):
            return None
        return walker


class _Answer:
    """Passes an answer on, but keeps a refusal (4xx) back."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.refused = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.refused = 400 <= message["status"] < 500
        if not self.refused:
            await self._send(message)


def _is_plain_json(scope: Scope) -> bool:
    headers = {name.lower(): value for name, value in scope["headers"]}
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    length = headers.get(b"content-length", b"")
    too_short = length.isdigit() and int(length) < MIN_TEXT_BYTES
    return bool(kind == b"application/json" and b"content-encoding" not in headers and not too_short)


async def _receive_all(receive: Receive) -> list[Message]:
    """All messages of the body, or, where the client goes before its end, what came and the disconnect."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def _one(body: bytes) -> list[Message]:
    return [{"type": "http.request", "body": body, "more_body": False}]


def _again(messages: list[Message], receive: Receive) -> Receive:
    """A `receive` that gives these messages first, then what comes."""
    left = iter(messages)

    async def receive_again() -> Message:
        for message in left:
            return message
        return await receive()

    return receive_again
