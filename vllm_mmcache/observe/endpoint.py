# SPDX-License-Identifier: Apache-2.0
"""The entry point `vllm.endpoint_plugins: mmcache_observe`: /mmcache on the API server, where VLLM_PLUGINS names it.

vLLM checks API keys only below paths such as /v1, so the keys are handed to our routes, which check them themselves.
Runs in the API server while its app is built.
"""

import os
from typing import Any

from vllm_mmcache import rooms
from vllm_mmcache.observe.recorder import RECORDER
from vllm_mmcache.observe.store import RecordStore
from vllm_mmcache.observe.web import routes


class Endpoint:
    """vLLM's EndpointPlugin. The routes are there whenever it is named, and say so while nothing is recorded."""

    name = "mmcache_observe"
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        """Add our routes to vLLM's FastAPI app, with the keys that vLLM itself asks for."""
        keys = [key for key in (app.state.args.api_key or [os.environ.get("VLLM_API_KEY")]) if key]
        app.router.routes.extend(routes(recorded, keys))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Nothing to prepare: records come from this process's own store."""


def recorded() -> RecordStore | None:
    """The store of this process, or None while nothing is recorded."""
    return RECORDER.store if rooms.is_on("observe") else None
