# SPDX-License-Identifier: Apache-2.0
"""Adds our ASGI middleware to vLLM's application, once while it is built. API server process."""

from typing import Any

from vllm_mmcache.base import status
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.hooking.hook import Hooks
from vllm_mmcache.metrics import counters, table_sizes

hook = Hooks(
    "report",
    "api",
)


@hook(
    "vllm.entrypoints.launchers.app:init_entrypoints_middleware",
    name="layers",
    args=("app",),
    why="image_extraction takes images out of bodies, and identity unsets the salt of a pipelined request before",
    upstream="none: --middleware needs a flag",
    remove_when="vLLM has an extension point for middleware that needs no flag",
)
def add(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of init_entrypoints_middleware(args, app, ...): ours comes after vLLM's, so it is the innermost."""
    outcome = wrapped(*args, **kwargs)
    from starlette.middleware import Middleware

    app = argument(wrapped, args, kwargs, "app")
    if status.is_on("identity"):
        from vllm_mmcache.components.identity.vllm_endpoints import use_on

        use_on(app)
    if status.is_on("image_extraction"):
        from vllm_mmcache.components.image_extraction.hooks import is_eligible
        from vllm_mmcache.components.image_extraction.middleware import ExtractImagesMiddleware

        app.user_middleware.append(Middleware(ExtractImagesMiddleware, is_eligible=is_eligible))
    counters.register()
    table_sizes.keep_shown()
    return outcome
