# SPDX-License-Identifier: Apache-2.0
"""The ledger's entries of the group `report`, which tells what is in force; it is no room. Data only."""

from functools import partial

from vllm_mmcache.hooking.hooks import TESTED_VLLM, Hook

_hook = partial(
    Hook,
    group="report",
    vllm=TESTED_VLLM,
    upstream="none: a plugin can't add to what an engine says when it is ready",
    remove_when="the ready message has a field for plugins, and a plugin is told when the engines are ready",
)
_shown = partial(
    _hook,
    make="vllm_mmcache.lifecycle.report:show_when_ready",
    process="api",
    args_used=("vllm_config",),
    why="when its engines are ready, a process knows what is in force everywhere, and says so",
)

REPORT: tuple[Hook, ...] = (
    _hook(
        name="report.send",
        target="vllm.v1.engine.core:EngineCoreProc._make_ready_response",
        make="vllm_mmcache.lifecycle.rank_sync:send_report",
        process="engine",
        args_used=(),
        why="every API server, on other machines too, is to know which rooms the engine and its workers have",
    ),
    _hook(
        name="report.receive",
        target="vllm.v1.engine.core_client:MPClient._apply_ready_response",
        make="vllm_mmcache.lifecycle.report:receive",
        process="api",
        args_used=("payload",),
        why="where the engine's message arrives",
    ),
    _shown(name="report.show", target="vllm.v1.engine.async_llm:AsyncLLM.__init__"),
    _shown(name="report.show_offline", target="vllm.v1.engine.llm_engine:LLMEngine.__init__"),
    _hook(
        name="report.layers",
        target="vllm.entrypoints.launchers.app:init_entrypoints_middleware",
        make="vllm_mmcache.lifecycle.middleware:add",
        process="api",
        args_used=("app",),
        why="lifted_bodies takes images out of bodies, and identity unsets the salt of a pipelined request before",
        upstream="none: --middleware needs a flag",
        remove_when="vLLM has an extension point for middleware that needs no flag",
    ),
    _hook(
        name="report.no_python",
        target="vllm.v1.utils:RustFrontendProcessManager.__init__",
        make="vllm_mmcache.lifecycle.report:no_python",
        process="api",
        args_used=(),
        why="with the Rust frontend nothing of ours is between clients and engines, and nobody would say so",
    ),
)
