# SPDX-License-Identifier: Apache-2.0
"""Checkpoints inside a prefill chunk, in vLLM's scheduler. Engine process, scheduler thread.

While a request has checkpoints to come, image_checkpoints says what each of its chunks may reach and which blocks it
has got, so those inside it get blocks of their own, if there are enough (vllm_blocks.py). Here the step that goes to
the workers is told which states go where. Nothing of this is guarded: a block whose key is published without its state
being written would be a wrong answer.
"""

from typing import Any

from vllm_mmcache.base.arguments import argument
from vllm_mmcache.components.image_checkpoints.vllm_planner import CHECKPOINTS
from vllm_mmcache.components.inner_checkpoints.cuts import CUTS
from vllm_mmcache.hooking.hook import Hooks

hook = Hooks(
    "inner_checkpoints",
    "engine",
    why="a chunk of a Mamba prefill that ends at a checkpoint costs a step, and changes the runs of the vision tower",
    upstream="none yet; 0.33 keeps one state inside a chunk, with FlashInfer's kernel alone",
    remove_when="vLLM keeps Mamba states at any position of a prefill chunk",
)


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule",
    name="tell",
    args=("scheduler_output",),
    reads=("vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.allocate_new_blocks",),
)
def tell_workers(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler._update_after_schedule: the step says which states its workers keep, and where."""
    checkpoints = getattr(instance, CHECKPOINTS, None)
    inner = checkpoints.underway.inside if checkpoints is not None else None
    if inner is not None and (inner.made or inner.wanted):
        step = argument(wrapped, args, kwargs, "scheduler_output")
        if cuts := inner.take_cuts(step.num_scheduled_tokens.keys()):
            setattr(step, CUTS, cuts)
    return wrapped(*args, **kwargs)
