# SPDX-License-Identifier: Apache-2.0
"""The ASGI layer that finds a request's tenant before anything else of the application sees the request.

API server process, event loop. If a client pipelines requests on one connection, each one starts at the end of the one
before it and inherits its context, so every request is first set to the common tenant. Pure ASGI, imports no vLLM;
vLLM's check of API keys runs before it.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vllm_mmcache.base import tenant
from vllm_mmcache.base.asgi import error_body, path_of
from vllm_mmcache.base.errors import TenantError

Call = Callable[..., Awaitable[None]]


class FindTenant:
    """Sets the salt of each request by its headers (TenantSource). Headers that can't name a tenant get a 400."""

    def __init__(self, app: Call, source: tenant.TenantSource) -> None:
        self.app = app
        self.source = source

    async def __call__(self, scope: MutableMapping[str, Any], receive: Call, send: Call) -> None:
        """Serve one ASGI call, whatever the task inherited. Raises: what the application raises."""
        tenant.SALT.set(None)
        tenant.REQUEST_SOURCE.set(self.source)
        if self.source.is_gateway and _has_tenant(scope):
            try:
                tenant.SALT.set(self.source.salt_in(scope["headers"]))
            except TenantError as error:
                return await _refuse(error, scope, send)
        await self.app(scope, receive, send)


def _has_tenant(scope: MutableMapping[str, Any]) -> bool:
    """Whether a request is somebody's: one that asks a model, or for a tenant's files; not one of a probe."""
    if scope["type"] == "websocket" or scope.get("method") == "POST":
        return True
    return scope["type"] == "http" and path_of(scope).startswith("/v1/files")


def refusal(path: str, error: TenantError) -> dict[str, Any]:
    """The body of a 400."""
    return error_body(path, 400, str(error), error.parameter)


async def _refuse(error: TenantError, scope: MutableMapping[str, Any], send: Call) -> None:
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1008, "reason": str(error)})
    body = json.dumps(refusal(path_of(scope), error)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
