# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at image boundaries, in vLLM's scheduler and KV cache. Engine process, scheduler thread.

When a request is looked up in the prefix cache, its checkpoints are chosen. A Mamba prefill then ends a chunk at each,
unless inner_checkpoints keeps the states inside one (a state exists only where a kernel stops), and when the blocks are
cached, the positions are handed to vLLM as further positions to resume at (vllm_underway.py). Which blocks that means
is vLLM's own calculation. Never changes what a block key says. Nothing here runs for a request that decodes.
"""

from typing import Any

from vllm_mmcache.base import engine_caches, status, uses
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.components.image_checkpoints.vllm_planner import CHECKPOINTS, Checkpoints, is_sparse
from vllm_mmcache.hooking.hook import Hooks

hook = Hooks(
    "image_checkpoints",
    "engine",
    upstream="56818",
    remove_when="vLLM keeps the states at image boundaries",
)


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler._get_local_prefix_cache_hit",
    name="plan",
    args=("request",),
    reads=(
        "vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split",
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks",
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.cache_blocks",
        "vllm.v1.core.block_pool:BlockHashToBlockMap.__len__",
    ),
    why="sparse retention keeps a state at the prompt's end alone: the second question about an image misses",
    upstream="43587, 51250, 45238, 48435; 56818 proposes a stop at the last image's end for Mamba",
)
def plan_checkpoints(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler._get_local_prefix_cache_hit: chooses the request's checkpoints behind its hit."""
    outcome = wrapped(*args, **kwargs)
    with failsafe("image_checkpoints"):
        checkpoints = checkpoints_of(instance)
        if checkpoints is not None:
            request = argument(wrapped, args, kwargs, "request")
            if uses.run_of(request) in ("", "trial"):
                checkpoints.plan(request, hit_tokens=outcome[1], junction_tokens=outcome[2])
    return outcome


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
    name="time",
    args=("scheduler_output",),
    why="what a step costs beside its tokens says which checkpoints pay that add one",
)
def time_steps(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler.update_from_output(scheduler_output, model_runner_output): once a step."""
    by_client = wrapped(*args, **kwargs)
    with failsafe("image_checkpoints"):
        checkpoints = checkpoints_of(instance)
        if checkpoints is not None:
            checkpoints.note_step(instance, argument(wrapped, args, kwargs, "scheduler_output"))
    return by_client


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request",
    name="preempt",
    args=("request",),
    reads=("vllm.v1.core.block_pool:BlockPool.evict_blocks",),
    why="with priorities a request can be preempted in the step that it was scheduled for: nobody computes what the "
    "keys of its blocks promise, and a checkpoint's key would be a hit",
    upstream="none yet: vLLM leaves the keys of all these blocks published",
    remove_when="vLLM withdraws the keys of blocks that are not computed after all",
)
def withdraw_keys(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler._preempt_request(request, timestamp): keys of what is not computed are withdrawn.

    Not guarded: such a key would be a wrong answer.
    """
    if checkpoints_of(instance) is not None:
        engine_caches.withdraw_keys(instance.kv_cache_manager, argument(wrapped, args, kwargs, "request"))
    return wrapped(*args, **kwargs)


def why_unneeded(scheduler: Any) -> str:
    """Why there is nothing to keep; empty where there is. When the scheduler is made."""
    return "" if checkpoints_of(scheduler) is not None else "this model keeps every block's KV"


def forget(scheduler: Any) -> None:
    """Forget all that was learned about a scheduler's checkpoints, while it has no request; it begins anew."""
    if (found := getattr(scheduler, CHECKPOINTS, None)) is not None:
        found.underway.end()
        delattr(scheduler, CHECKPOINTS)


def checkpoints_of(scheduler: Any) -> Checkpoints | None:
    """The scheduler's checkpoints; None where nothing is kept sparsely, or where they are off."""
    if not hasattr(scheduler, CHECKPOINTS):
        manager = scheduler.kv_cache_manager
        keeps_few = manager.enable_caching and any(map(is_sparse, manager.coordinator.single_type_managers))
        setattr(scheduler, CHECKPOINTS, Checkpoints(scheduler) if keeps_few else None)
    found: Checkpoints | None = getattr(scheduler, CHECKPOINTS)
    return found if status.is_on("image_checkpoints") else None
