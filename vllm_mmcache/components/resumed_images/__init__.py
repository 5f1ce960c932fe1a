# SPDX-License-Identifier: Apache-2.0
"""A preempted request that comes back brings its images' inputs along. Engine and worker process."""

from vllm_mmcache.hooking.component import Component

COMPONENT = Component(
    "resumed_images",
    __name__,
    hooks={"engine": ("hooks",), "worker": ("hooks",)},
    rule="rules:state_in",
    images_only=True,
    proven_per="engine",
    superseded_if_reads=("vllm.v1.core.sched.scheduler:Scheduler._make_cached_request_data", "mm_features"),
)
