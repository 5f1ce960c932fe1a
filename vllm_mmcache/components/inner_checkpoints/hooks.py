# SPDX-License-Identifier: Apache-2.0
"""Checkpoints inside a prefill chunk, in vLLM's scheduler and KV cache. Engine process, scheduler thread.

When a chunk is planned, the checkpoints behind its first token are noted; when its blocks are allocated, those inside
it get blocks of their own, if there are enough; and the step that goes to the workers says which states go where.
Nothing here is guarded: a block whose key is published without its state being written would be a wrong answer.
"""

from typing import Any

from vllm_mmcache.base import status
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.components.image_checkpoints.vllm_planner import PLAN
from vllm_mmcache.components.inner_checkpoints.cuts import CUTS
from vllm_mmcache.components.inner_checkpoints.vllm_blocks import InnerBlocks, Wanted
from vllm_mmcache.hooking.hook import Hooks

_INNER = "_mmcache_inner_blocks"  # attribute of a coordinator that holds its InnerBlocks


hook = Hooks(
    "inner_checkpoints",
    "engine",
    why="a chunk of a Mamba prefill that ends at a checkpoint costs a step, and changes the runs of the vision tower",
    upstream="none yet; 0.33 keeps one state inside a chunk, with FlashInfer's kernel alone",
    remove_when="vLLM keeps Mamba states at any position of a prefill chunk",
)


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split",
    name="want",
    args=("request", "num_new_local_computed_tokens", "num_external_computed_tokens"),
)
def want_states(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler._mamba_block_aligned_split: notes the checkpoints behind the start of a request's chunk."""
    request = argument(wrapped, args, kwargs, "request")
    plan = getattr(request, PLAN, None)
    if plan is None or not plan.checkpoints:  # most requests, in every step
        return wrapped(*args, **kwargs)
    found = [argument(wrapped, args, kwargs, f"num_{where}_computed_tokens") for where in ("new_local", "external")]
    start = request.num_computed_tokens + sum(found)
    if start < plan.checkpoints[-1].tokens and status.is_on("inner_checkpoints"):
        tokens = tuple(checkpoint.tokens for checkpoint in plan.checkpoints)
        blocks_of(instance).wanted[request.request_id] = Wanted(start, tokens, request.num_tokens)
    return wrapped(*args, **kwargs)


@hook(
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.allocate_new_blocks",
    name="fill",
    args=("request_id", "num_tokens_main_model"),
)
def fill_holes(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of KVCacheCoordinator.allocate_new_blocks: the checkpoints inside the chunk get blocks, too."""
    new_blocks = wrapped(*args, **kwargs)
    inner = getattr(instance, _INNER, None)
    if inner is not None and inner.wanted:
        request_id = argument(wrapped, args, kwargs, "request_id")
        inner.fill(request_id, argument(wrapped, args, kwargs, "num_tokens_main_model"), new_blocks)
    return new_blocks


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule",
    name="tell",
    args=("scheduler_output",),
)
def tell_workers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler._update_after_schedule: the step says which states its workers keep, and where."""
    inner = getattr(instance.kv_cache_manager.coordinator, _INNER, None)
    if inner is not None and (inner.made or inner.wanted):
        step = argument(wrapped, args, kwargs, "scheduler_output")
        if cuts := inner.take_cuts(step.num_scheduled_tokens.keys()):
            setattr(step, CUTS, cuts)
    return wrapped(*args, **kwargs)


def blocks_of(scheduler: Any) -> InnerBlocks:
    """The scheduler's blocks of checkpoints inside a chunk."""
    coordinator = scheduler.kv_cache_manager.coordinator
    if not hasattr(coordinator, _INNER):
        setattr(coordinator, _INNER, InnerBlocks(coordinator))
    found: InnerBlocks = getattr(coordinator, _INNER)
    return found
