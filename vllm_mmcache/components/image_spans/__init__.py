# SPDX-License-Identifier: Apache-2.0
"""Images that attend both ways are never split by a step, and run as such.

`hooks_engine` cuts steps around spans (`spans`) and gives long ones their turn, `hooks_api` refuses what no step can
hold, and `vllm_backend` is the attention backend that reads images' full KV from the paged cache, in the faster form
of what `reference_attention/` computes; `rules` says of which models images would run causally. Engine, API and worker
process.
"""

from vllm_mmcache.hooking.component import Component

COMPONENT = Component(
    "image_spans",
    __name__,
    hooks={"api": ("hooks_api",), "engine": ("hooks_engine",), "worker": ("hooks_worker",)},
    rule="rules:state_in",
    on_install={"worker": "vllm_registry"},
    proven_per="engine",
    superseded_by=(
        "vllm.v1.core.sched.scheduler:Scheduler._clip_to_whole_mm_spans",
        "vllm.v1.attention.backends.cpu_attn:split_at_mm_prefix",
    ),
)
