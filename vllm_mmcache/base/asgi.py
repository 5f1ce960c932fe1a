# SPDX-License-Identifier: Apache-2.0
"""What ASGI layers that read a request's body have in common. API server process, event loop; imports no vLLM."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def path_of(scope: Scope) -> str:
    """The path of a request as the application has it, without the prefix that a proxy is known by."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path


def is_plain_json(scope: Scope) -> bool:
    """Whether the headers say that the body is JSON, and neither compressed nor otherwise encoded."""
    headers = {name.lower(): value for name, value in scope["headers"]}
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return bool(kind == b"application/json" and b"content-encoding" not in headers)


async def receive_all(receive: Receive) -> list[Message]:
    """All messages of the body, or, where the client goes before its end, what came and the disconnect."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
        messages.append(await receive())
    return messages


def as_message(body: bytes) -> list[Message]:
    """The one message of a body that came whole."""
    return [{"type": "http.request", "body": body, "more_body": False}]


def receive_again(messages: list[Message], receive: Receive) -> Receive:
    """A `receive` that gives these messages first, then what comes."""
    left = iter(messages)

    async def receive_next() -> Message:
        for message in left:
            return message
        return await receive()

    return receive_next
