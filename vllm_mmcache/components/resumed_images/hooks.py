# SPDX-License-Identifier: Apache-2.0
"""A preempted request that comes back with a shorter prefix hit finds its image inputs.

vLLM sends a worker no inputs of images inside the prefix hit, and never sends them later: a request that is preempted
and comes back with a shorter hit has nothing to encode ("Encoder cache miss"), and the engine dies. So the scheduler
sends the inputs behind the new hit along with a resumed request, and the worker puts them into what it knows of it.
Other requests cost nothing. vLLM's second model runner is sent a resumed request anew, and needs none of this.
"""

from typing import Any

from vllm.multimodal.utils import strip_covered_mm_data

from vllm_mmcache.base import status, uses
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.hooking.hook import Hooks

_IMAGES = "mmcache_images"  # attribute of the step's CachedRequestData: request id -> image index -> feature


hook = Hooks(
    "resumed_images",
    "engine",
    why="a preempted request that comes back with a shorter prefix hit finds no image inputs; the engine dies",
    upstream="none yet; reproduced on 0.32 under random load with a small KV cache",
    remove_when=(
        "vLLM's model runner V1 is gone: V2 (0.32, 0.33) is sent a resumed request as a new one, images included"
    ),
)


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler._make_cached_request_data",
    name="send",
    args=("resumed_reqs",),
    reads=("vllm.multimodal.utils:strip_covered_mm_data",),
)
def send_images(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler._make_cached_request_data: resumed requests bring image inputs behind their hit along.

    Engine process, scheduler thread.
    """
    step = wrapped(*args, **kwargs)
    if not status.is_on("resumed_images"):
        return step
    images: dict[str, dict[int, Any]] = {}
    for request in argument(wrapped, args, kwargs, "resumed_reqs"):
        features = strip_covered_mm_data(request.mm_features, request.num_computed_tokens, uses_mrope=True)
        missing = {
            index: feature
            for index, feature in enumerate(features)
            # What lies in shared memory is never dropped, and was read when the request was new.
            if feature.data and "address" not in feature.data and feature is request.mm_features[index]
        }
        if missing:
            images[request.request_id] = missing
            uses.note(request, "resumed_images")
    if images:
        setattr(step, _IMAGES, images)
    return step


@hook(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
    name="receive",
    process="worker",
    args=("scheduler_output",),
)
def receive_images(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of GPUModelRunner._update_states(scheduler_output): image inputs that came along are put in first.

    Worker process, model runner's thread.
    """
    step = argument(wrapped, args, kwargs, "scheduler_output").scheduled_cached_reqs
    for request_id, images in getattr(step, _IMAGES, {}).items():
        state = instance.requests.get(request_id)
        if state is not None:
            features = state.mm_features
            state.mm_features = [images.get(index, feature) for index, feature in enumerate(features)]
    return wrapped(*args, **kwargs)
