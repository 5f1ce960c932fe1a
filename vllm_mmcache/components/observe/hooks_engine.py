# SPDX-License-Identifier: Apache-2.0
"""The engine's side of a record: looks at each prefix lookup, and sends what it found with the first output.

Engine process, scheduler thread. It asks vLLM's KV cache manager, coordinator and block pool, and changes nothing in
them. Imports no vLLM: it meets vLLM's objects as arguments. It must never fail a request.
"""

import time
from typing import Any

from vllm_mmcache.base import status, uses
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.components.observe.observer import OBSERVER, REQUEST_STATE, Observer
from vllm_mmcache.hooking.hook import Hooks

hook = Hooks(
    "observe",
    "engine",
    upstream="43587, 51250, 45238, 31920 ask why; the RFC 43711 went stale",
    remove_when="vLLM says for each request what was not reused and why",
)


@hook(
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
    name="lookup",
    args=("request",),
    reads=("vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.find_longest_cache_hit_per_group",),
    why="what each group had is known at the lookup only",
)
def note_lookup(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of KVCacheManager.get_computed_blocks(request): looks at each hit but those after a preemption."""
    outcome = wrapped(*args, **kwargs)
    if status.is_on("observe"):
        with failsafe("observe"):
            request = argument(wrapped, args, kwargs, "request")
            if request.num_preemptions == 0 and not uses.run_of(request):
                _observer_of(instance).look(request, outcome[1])
    return outcome


@hook(
    "vllm.v1.core.block_pool:BlockPool._maybe_evict_cached_block",
    name="evicted",
    args=("block",),
    why="an evicted block is told from one that never was; KV events need a switch and a consumer",
)
def note_evicted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of BlockPool._maybe_evict_cached_block(block): remembers when a block had to go."""
    block = argument(wrapped, args, kwargs, "block")
    observer = getattr(instance, OBSERVER, None)
    if observer is not None and block.block_hash is not None:
        observer.evicted(block.block_hash)
    return wrapped(*args, **kwargs)


@hook(
    "vllm.v1.core.block_pool:BlockPool.reset_prefix_cache",
    name="reset",
    why="a reset of the prefix cache is told from evictions",
)
def note_reset(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of BlockPool.reset_prefix_cache: remembers when blocks of before were forgotten, if they were."""
    outcome = wrapped(*args, **kwargs)
    observer = getattr(instance, OBSERVER, None)
    if observer is not None and outcome:
        observer.reset_s = time.time()
    return outcome


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler._free_request",
    name="finished",
    args=("request",),
    why="the answer's tokens belong to what a next turn can reuse",
)
def note_finished(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler._free_request(request): the history keeps what of its answer has KV."""
    request = argument(wrapped, args, kwargs, "request")
    seen = getattr(request, REQUEST_STATE, None)
    if seen is not None:
        with failsafe("observe"):
            _observer_of(instance.kv_cache_manager).finish(request, seen)
    return wrapped(*args, **kwargs)


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    name="outcome",
    args=("scheduler_output",),
    why="a request's first output takes along what was found for it",
)
def send_outcome(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler.update_from_output(scheduler_output, ...): first outputs say what was found."""
    if not status.is_on("observe"):
        return wrapped(*args, **kwargs)
    observer = _observer_of(instance.kv_cache_manager)
    scheduled = argument(wrapped, args, kwargs, "scheduler_output")
    if scheduled.scheduled_encoder_inputs:
        with failsafe("observe"):
            observer.note_images(instance, scheduled.scheduled_encoder_inputs)
    if not observer.waiting:  # a step that only goes on with answers
        return wrapped(*args, **kwargs)
    by_client = wrapped(*args, **kwargs)
    with failsafe("observe"):
        for outputs in by_client.values():
            for output in outputs.outputs:
                if output.prefill_stats is not None:
                    observer.send(instance, output)
        observer.drop_ended()
    return by_client


def _observer_of(manager: Any) -> Observer:
    found: Observer | None = getattr(manager, OBSERVER, None)
    if found is None:
        found = Observer(manager)
        setattr(manager, OBSERVER, found)
    return found
