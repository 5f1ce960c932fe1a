# SPDX-License-Identifier: Apache-2.0
"""Switches a component off in an engine that runs: from then on it does nothing, and nothing that it made is used.

Engine process, its main thread, between two steps. What finds a component wrong calls it: the trial at
start, and the audit of live traffic.
Every wrapper of a component asks base/status.py, so most of it is to say so there, in the engine and in all ranks. What
a component has put in vLLM's place is taken back, what it keeps is closed, and the prefix cache and the encoder caches
are emptied, since they may hold what it made. The processor cache stays: it holds the inputs of images, which no
component of the engine makes, and the API servers count on what is in it.
"""

import logging
from collections.abc import Callable
from typing import Any

from vllm_mmcache.base import engine_caches, status
from vllm_mmcache.base.errors import EngineBusy
from vllm_mmcache.base.status import State
from vllm_mmcache.lifecycle import rank_sync
from vllm_mmcache.lifecycle.registry import COMPONENTS

logger = logging.getLogger("vllm.mmcache")


def switch_off(engine_core: Any, component: str, reason: str, *, is_ready: bool = True) -> None:
    """Switch a component off in this engine, and what needs it; nothing where it is off, or unneeded, already.

    Requests that run begin anew, with the answers that they have so far. It can't be undone.
    engine_core: vLLM's EngineCore. reason: what the report and the metrics say of the component. is_ready: whether the
    engine has said that it is; else its ready message will tell the API servers.
    Raises: EngineBusy for resumed_images while there are requests, which would end with the engine.
    """
    off = {component: reason}
    for other in COMPONENTS.values():
        if other.needs in off:
            off[other.name] = f"needs {other.needs}, which is off"
    in_force = [name for name in off if status.State("on") in _states_of(engine_core, name)]
    if not in_force:
        return
    scheduler = engine_core.scheduler
    is_busy = bool(scheduler.has_unfinished_requests())
    if is_busy and "resumed_images" in in_force:
        raise EngineBusy("resumed_images can't be switched off while there are requests: they may need it to resume")
    if is_busy:  # while the component still takes back what it has begun for them
        scheduler.reset_prefix_cache(reset_running_requests=True)
    for name in in_force:
        if name in status.of("engine"):
            status.put("engine", name, State("off", off[name]))
    rank_sync.switch_off_in_ranks(engine_core.model_executor, {name: off[name] for name in in_force})
    for name in in_force:
        if (close := _CLOSE.get(name)) is not None:
            close(engine_core)
    is_empty = scheduler.reset_prefix_cache(reset_connector=True)
    engine_caches.withdraw_all_keys(scheduler.kv_cache_manager)  # those of a session that waits for more input are left
    if not is_empty and scheduler.connector is not None:
        logger.warning("mmcache: a KV connector could not be emptied; what %s made may lie in it", component)
    engine_core.reset_encoder_cache()
    logger.info("mmcache: switched off: %s", "; ".join(f"{name}: {off[name]}" for name in in_force))
    if is_ready:
        _announce(engine_core)


def _states_of(engine_core: Any, component: str) -> list[State]:
    """What a component is in the engine and in each rank, where they have a part of it."""
    places = [status.of("engine"), *rank_sync.of_ranks(engine_core.model_executor).values()]
    return [states[component] for states in places if component in states]


def _announce(engine_core: Any) -> None:
    from vllm_mmcache.metrics import hooks

    hooks.announce_states(engine_core, rank_sync.of_engine(engine_core))


def _close_features(engine_core: Any) -> None:
    from vllm_mmcache.components.features.engine.hooks import close_store

    close_store(engine_core.vllm_config, writes=False)


def _give_back_hasher(engine_core: Any) -> None:
    from vllm_mmcache.components.block_keys.hooks import give_back

    give_back(engine_core)


def _forget_checkpoints(engine_core: Any) -> None:
    from vllm_mmcache.components.image_checkpoints.hooks import forget

    forget(engine_core.scheduler)


_CLOSE: dict[str, Callable[[Any], None]] = {
    "features": _close_features,
    "block_keys": _give_back_hasher,
    "image_checkpoints": _forget_checkpoints,
}
