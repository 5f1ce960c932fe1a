# SPDX-License-Identifier: Apache-2.0
"""The page on an address of its own, which the server's clients need not reach: the setting `observe_listen`.

API server process, a thread with an event loop of its own. Of several API servers on a machine the first one serves
it, since each knows the requests of all.
"""

import errno
import logging
import os
import socket
import threading
from collections.abc import Sequence

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route

from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.base.store_url import host_and_port

logger = logging.getLogger("vllm.mmcache")


def listen(address: str, routes: Sequence[Route]) -> uvicorn.Server | None:
    """Serve `routes` on HOST:PORT until the process ends; None where another API server has the address.

    Raises: SettingsError where nobody of this deployment can have it.
    """
    host, port = host_and_port(address)
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        # vLLM makes this folder where it starts several API servers.
        if error.errno == errno.EADDRINUSE and os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            logger.info("mmcache: %s is served by another process, an API server of this deployment", address)
            return None
        raise SettingsError(
            f"observe_listen {address}: {error.strerror}: name an address of this machine and a free port"
        ) from None
    app = Starlette(routes=list(routes))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, log_config=None))
    run = threading.Thread(target=server.run, args=([listener],), name="mmcache-page", daemon=True)
    run.start()
    return server
