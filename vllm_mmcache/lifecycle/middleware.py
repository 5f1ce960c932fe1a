# SPDX-License-Identifier: Apache-2.0
"""Adds our ASGI middleware to vLLM's application, once while it is built. API server process."""

import logging
from functools import partial
from typing import Any

from vllm_mmcache.base import settings, status
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.hooking.hook import Hooks
from vllm_mmcache.metrics import counters, table_sizes

logger = logging.getLogger("vllm.mmcache")

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
    if settings.current().files is not None:
        _add_files(app)
    counters.register()
    table_sizes.keep_shown()
    return outcome


def _add_files(app: Any) -> None:
    """Adds /v1/files and the layer that puts files in their places, where tenants and images are in good hands.

    Raises: FilesUnusable, SettingsError as FileStore.of.
    """
    from starlette.middleware import Middleware

    from vllm_mmcache.components.identity.aliases import ALIASES
    from vllm_mmcache.components.image_extraction.hooks import image_formats, is_for_image_loader, most_pixels
    from vllm_mmcache.components.image_extraction.request_shapes import WALKERS
    from vllm_mmcache.files.endpoints import FileEndpoints, HideSalts
    from vllm_mmcache.files.middleware import PutFilesMiddleware
    from vllm_mmcache.files.named import NamedImages
    from vllm_mmcache.files.store import FileStore

    chosen = settings.current()
    missing = [component for component in ("identity", "lazy_media") if not status.is_on(component)]
    if missing:
        logger.warning("mmcache: there is no /v1/files: MMCACHE_FILES needs %s to be on", " and ".join(missing))
        return
    store = FileStore.of(chosen)
    formats = image_formats()
    endpoints = FileEndpoints(store, max_bytes=chosen.file_bytes, max_pixels=most_pixels(), formats=formats)
    app.router.routes.extend(endpoints.routes())
    named = None
    if chosen.files_uuids:
        is_known = partial(ALIASES.knows, "image")
        named = NamedImages(FileStore.of(chosen, "named"), is_known, max_bytes=chosen.file_bytes, formats=formats)
    layer = Middleware(
        PutFilesMiddleware,
        store=store,
        may_name_files=WALKERS.__contains__,
        takes_files=is_for_image_loader,
        named_images=named,
    )
    app.user_middleware.append(layer)
    app.user_middleware.insert(0, Middleware(HideSalts))
