# SPDX-License-Identifier: Apache-2.0
"""The ASGI layer that has every request begin as nobody's.

API server process, event loop. Of requests that a client pipelines on one connection, a later one is begun by the end
of the one before it, and inherits its context; an endpoint whose requests have no cache_salt would then work with that
one's. Pure ASGI, imports no vLLM.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vllm_mmcache import tenant

Call = Callable[..., Awaitable[None]]


class BeginAsNobody:
    """Forgets the salt of the request before."""

    def __init__(self, app: Call) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Call, send: Call) -> None:
        """Serve one ASGI call with the salt unset, whatever the task inherited. Raises: what the application raises."""
        tenant.SALT.set(None)
        await self.app(scope, receive, send)
