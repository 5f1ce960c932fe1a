# SPDX-License-Identifier: Apache-2.0
"""Adds our ASGI middleware to vLLM's application, once while it is built. API server process."""

from typing import Any

from vllm_mmcache import rooms
from vllm_mmcache.arguments import argument
from vllm_mmcache.metrics import counters, sizes


def add(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of init_entrypoints_middleware(args, app, ...): ours comes after vLLM's, so it is the innermost."""
    outcome = wrapped(*args, **kwargs)
    from starlette.middleware import Middleware

    app = argument(wrapped, args, kwargs, "app")
    if rooms.is_on("identity"):
        from vllm_mmcache.identity.endpoints import use_on

        use_on(app)
    if rooms.is_on("lifted_bodies"):
        from vllm_mmcache.lifted_bodies.layer import LiftImages
        from vllm_mmcache.lifted_bodies.server import may_lift

        app.user_middleware.append(Middleware(LiftImages, may_lift=may_lift))
    counters.expose()
    sizes.keep_shown()
    return outcome
