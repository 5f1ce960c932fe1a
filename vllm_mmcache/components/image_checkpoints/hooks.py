# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at image boundaries, in vLLM's scheduler and KV cache. Engine process, scheduler thread.

When a request is looked up in the prefix cache, its checkpoints are chosen. A Mamba prefill then ends a chunk at each,
unless inner_checkpoints keeps the states inside one (a state exists only where a kernel stops), and when the blocks are
cached, the positions are handed to vLLM as further positions to resume at. Which blocks that means is vLLM's own
calculation. Never changes what a block key says.
"""

from typing import Any

from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from vllm_mmcache.base import status
from vllm_mmcache.base.arguments import argument, named
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.base.status import State
from vllm_mmcache.components.image_checkpoints.positions import Checkpoint
from vllm_mmcache.components.image_checkpoints.vllm_planner import PLAN, Checkpoints, is_sparse
from vllm_mmcache.hooking.hook import Hooks

_CHECKPOINTS = "_mmcache_checkpoints"


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
    why="sparse retention keeps a state at the prompt's end alone: the second question about an image misses",
    upstream="43587, 51250, 45238, 48435; 56818 proposes a stop at the last image's end for Mamba",
)
def plan_checkpoints(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler._get_local_prefix_cache_hit: chooses the request's checkpoints behind its hit."""
    outcome = wrapped(*args, **kwargs)
    with failsafe("image_checkpoints"):
        checkpoints = _checkpoints_of(instance)
        if checkpoints is not None:
            request = argument(wrapped, args, kwargs, "request")
            checkpoints.plan(request, hit_tokens=outcome[1], junction_tokens=outcome[2])
    return outcome


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split",
    name="split",
    args=("request", "num_new_tokens", "num_new_local_computed_tokens", "num_external_computed_tokens"),
    why="a Mamba state exists only where a prefill chunk ends",
)
def stop_at_checkpoints(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler._mamba_block_aligned_split: asks for a chunk that does not run past a checkpoint."""
    request = argument(wrapped, args, kwargs, "request")
    checkpoints = _plan_of(request)
    if not checkpoints or status.is_on("inner_checkpoints"):  # most requests, in every step; or a state needs no end
        return wrapped(*args, **kwargs)
    given = named(wrapped, args, kwargs)
    found = [argument(wrapped, args, kwargs, f"num_{where}_computed_tokens") for where in ("new_local", "external")]
    start = request.num_computed_tokens + sum(found)
    end = start + given["num_new_tokens"]
    for checkpoint in checkpoints:
        if start < checkpoint.tokens < end:
            given["num_new_tokens"] = checkpoint.tokens - start
            break
    return wrapped(**given)


@hook(
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.cache_blocks",
    name="keep",
    args=("request", "replay_boundaries"),
    why="the blocks at image boundaries are to be found by later requests",
)
def keep_checkpoints(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of SingleTypeKVCacheManager.cache_blocks: the checkpoints are positions to resume at, too."""
    request = argument(wrapped, args, kwargs, "request")
    checkpoints = _plan_of(request)
    if not checkpoints or not isinstance(instance.kv_cache_spec, SlidingWindowSpec | MambaSpec):
        return wrapped(*args, **kwargs)
    kwargs = kwargs | {"replay_boundaries": [*kwargs["replay_boundaries"], *(c.tokens for c in checkpoints)]}
    before = instance.num_cached_block.get(request.request_id, 0)
    outcome = wrapped(*args, **kwargs)
    with failsafe("image_checkpoints"):
        getattr(request, PLAN).owner.note_kept(request, instance, before, checkpoints)
    return outcome


def report_applicability(scheduler: Any) -> None:
    """Say where there is nothing to keep; when the scheduler is made. Engine process."""
    if _checkpoints_of(scheduler) is None:
        status.put("engine", "image_checkpoints", State("unneeded", "this model keeps every block's KV"))


def _checkpoints_of(scheduler: Any) -> Checkpoints | None:
    """The scheduler's checkpoints; None where nothing is kept sparsely, or where they are off."""
    if not hasattr(scheduler, _CHECKPOINTS):
        manager = scheduler.kv_cache_manager
        keeps_few = manager.enable_caching and any(map(is_sparse, manager.coordinator.single_type_managers))
        setattr(scheduler, _CHECKPOINTS, Checkpoints(scheduler) if keeps_few else None)
    found: Checkpoints | None = getattr(scheduler, _CHECKPOINTS)
    return found if status.is_on("image_checkpoints") else None


def _plan_of(request: Any) -> tuple[Checkpoint, ...]:
    plan = getattr(request, PLAN, None)
    return plan.checkpoints if plan is not None else ()
