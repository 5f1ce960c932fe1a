# SPDX-License-Identifier: Apache-2.0
"""The entry point `vllm.endpoint_plugins: mmcache_observe`: /mmcache on the API server, where VLLM_PLUGINS names it.

The routes check a key of their own: vLLM's API keys are those of all clients, who may not read about each other.
Runs in the API server while its app is built.
"""

import logging
from typing import Any

from vllm_mmcache.base import settings, status
from vllm_mmcache.components.observe.page.admin import MISSING, admin_key
from vllm_mmcache.components.observe.page.listener import listen
from vllm_mmcache.components.observe.page.web import routes
from vllm_mmcache.components.observe.record.recorder import RECORDER
from vllm_mmcache.components.observe.record.store import RecordStore

logger = logging.getLogger("vllm.mmcache")


class Endpoint:
    """vLLM's EndpointPlugin. The routes are there whenever it is named, and say so while nothing is recorded."""

    name = "mmcache_observe"
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        """Add our routes to vLLM's FastAPI app, or serve them on an address of their own, where one is set.

        Raises: SettingsError where the admin key can't be read, or the address not be had.
        """
        chosen = settings.current()
        ours = routes(recorded, admin_key(chosen), status.as_json)
        if chosen.observe_listen:
            listen(chosen.observe_listen, ours)
        else:
            app.router.routes.extend(ours)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Say where the page is: the engines are ready, and what is in force is known."""
        logger.info("mmcache: the page is %s, `mmcache explain` says the same", address(args))
        if admin_key(settings.current()) is None:
            logger.warning("mmcache: %s", MISSING)


def address(args: Any) -> str:
    """Where the page of a server with these arguments of vLLM's is, as far as they say."""
    if own := settings.current().observe_listen:
        return f"http://{own}/mmcache"
    if args.uds:
        return f"/mmcache on {args.uds}"
    host = args.host or "127.0.0.1"
    scheme = "https" if args.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{args.port}/mmcache"


def recorded() -> RecordStore | None:
    """The store of this process, or None while nothing is recorded."""
    return RECORDER.store if status.is_on("observe") else None
