# SPDX-License-Identifier: Apache-2.0
"""Keeps the state at image boundaries, so that the second question about an image is a hit. Engine process.

Only for models whose KV cache keeps states sparsely: sliding-window and Mamba (GDN) groups. vLLM keeps the state of
such groups at a prompt's end alone; a request that shares the image but not the question finds nothing there. A
positive `prefix_cache_retention_interval` would keep states at every so many tokens: a hit falls short by up to that
many, and every prompt pays. Where inner_checkpoints is off, a checkpoint of a Mamba model ends a prefill chunk, so
it changes which images share a run of the tower: that weighs more in a first request's time than the checkpoint itself.
"""

from vllm_mmcache.hooking.component import Component

COMPONENT = Component(
    "image_checkpoints",
    __name__,
    hooks={"engine": ("hooks",)},
    rule="rules:state_in",
    images_only=True,
    proven_per="engine",
    on_if="if the model, when it is loaded, has layers that don't keep every block: sliding windows or Mamba",
    # The proposal 56818 has the last multimodal feature's end on the request, under a name that isn't settled.
    superseded_if_reads=("vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split", "mm_"),
)
