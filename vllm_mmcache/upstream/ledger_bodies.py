# SPDX-License-Identifier: Apache-2.0
"""The part of the ledger that takes images out of request bodies before vLLM parses them; data only, as the rest."""

from functools import partial

from vllm_mmcache.upstream.swap import TESTED_VLLM, Swap

_swap = partial(Swap, vllm=TESTED_VLLM)

BODIES: tuple[Swap, ...] = (
    _swap(
        name="lifted_bodies.layer",
        group="lifted_bodies",
        target="vllm.entrypoints.launchers.app:init_entrypoints_middleware",
        reads=("vllm.renderers.hf:HfRenderer.render_messages_async",),
        make="vllm_mmcache.body.vllm_side:add_layer",
        process="api",
        args_used=("app",),
        why="megabytes of base64 are parsed, validated and copied as text on every turn; --middleware needs a flag",
        upstream="44688: requests wait for a busy frontend",
        remove_when="vLLM has a seam for middleware that needs no flag, or takes images out of bodies itself",
    ),
    _swap(
        name="lifted_bodies.engine",
        group="lifted_bodies",
        target="vllm.v1.engine.async_llm:AsyncLLM.add_request",
        make="vllm_mmcache.body.vllm_side:tell_layer",
        process="api",
        args_used=(),
        why="a refusal is asked for again with the body as it came, but none that the engine has generated for",
        upstream="none: no answer says whether its request reached the engine",
        remove_when="lifted_bodies.layer is gone",
    ),
)
