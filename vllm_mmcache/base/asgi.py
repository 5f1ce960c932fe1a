# SPDX-License-Identifier: Apache-2.0
"""What our ASGI layers have in common: reading a body, and refusing a request. API server process; imports no vLLM."""

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


ERROR_TYPES = {
    400: ("BadRequestError", "invalid_request_error"),
    404: ("NotFoundError", "not_found_error"),
    413: ("BadRequestError", "request_too_large"),
    503: ("ServiceUnavailableError", "overloaded_error"),
}
"""By status, what vLLM calls an error in OpenAI's form, and what Anthropic does."""


def error_body(path: str, status: int, message: str, parameter: str | None) -> dict[str, Any]:
    """The body of an error, in the same form as vLLM's own errors at `path`.

    A layer of vLLM around this one turns OpenAI's form into Cohere's. parameter: the field that is wrong.
    """
    kind, anthropic = ERROR_TYPES[status]
    if path in ("/v1/messages", "/v1/messages/count_tokens"):
        return {"type": "error", "error": {"type": anthropic, "message": message}}
    return {"error": {"message": message, "type": kind, "param": parameter, "code": status}}


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
