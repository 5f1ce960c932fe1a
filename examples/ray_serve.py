# SPDX-License-Identifier: Apache-2.0
"""Several replicas of vLLM's OpenAI-compatible server with Ray Serve: a picture's questions go to the one that saw it.

    pip install '.[cuda,ray]'
    python examples/ray_serve.py --replicas 2 Qwen/Qwen3-VL-8B-Instruct --max-model-len 8192

What follows the model goes to each replica's vLLM. Ray Serve's proxy reads the header x-session-id, which the client
transport sets (vllm_mmcache.client), and its consistent-hash router sends all requests with one name to one replica.
Requests without the header are spread.
"""

import argparse
from contextlib import AsyncExitStack
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


@serve.ingress()
class Replica:
    """An engine and vLLM's own HTTP application before it; the plugin works in both as under `vllm serve`."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._running = AsyncExitStack()

    async def __serve_build_asgi_app__(self) -> Any:
        """Start the engine, and return its application. Ray Serve calls this after the constructor."""
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(self._arguments)
        validate_parsed_serve_args(parsed)
        engine = await self._running.enter_async_context(build_async_engine_client(parsed))
        tasks = await engine.get_supported_tasks()
        app = build_app(parsed, tasks, engine.model_config)
        await init_app_state(engine, app.state, parsed, tasks)
        return app

    async def __del__(self) -> None:
        await self._running.aclose()


def main() -> None:
    """Deploy the replicas, on this machine or in the cluster of RAY_ADDRESS, and serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description="Serve a model on several replicas with Ray Serve.")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=1, help="of each replica; 0 for engines without a GPU")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--requests", type=int, default=256, help="at once on a replica; others go to the next one")
    parser.add_argument("model")
    parser.add_argument("vllm", nargs=argparse.REMAINDER, metavar="...", help="further arguments of vllm serve")
    given = parser.parse_args()
    deployment = serve.deployment(
        Replica,
        num_replicas=given.replicas,
        max_ongoing_requests=given.requests,
        ray_actor_options={"num_cpus": 1, "num_gpus": given.gpus},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )
    serve.start(http_options={"host": given.host, "port": given.port})
    arguments = ["--model", given.model, "--enable-prefix-caching", *given.vllm]
    serve.run(deployment.bind(arguments), name="vllm", blocking=True)


if __name__ == "__main__":
    main()
