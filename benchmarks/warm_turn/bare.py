# SPDX-License-Identifier: Apache-2.0
"""The least that a server under uvicorn can do with a body: receive it, and answer. Half of the floor."""

from collections.abc import Awaitable, Callable
from typing import Any


async def app(
    scope: dict[str, Any],
    receive: Callable[[], Awaitable[dict[str, Any]]],
    send: Callable[[dict[str, Any]], Awaitable[None]],
) -> None:
    """An ASGI application without lifespan: every body is received whole and answered with one line."""
    pieces = []
    while True:
        message = await receive()
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    b"".join(pieces)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]})
    await send({"type": "http.response.body", "body": b"data:\n"})
