# SPDX-License-Identifier: Apache-2.0
"""Keeps Mamba (GDN) states inside a prefill chunk, so that a checkpoint does not end it. Engine and worker process.

A Mamba state exists only where the layer's kernel stops. Instead of the whole step, which ends a chunk of the prefill
and changes which images share a run of the vision tower, the kernel alone stops at a checkpoint: it is called on the
tokens before it, the state is copied into a block of the checkpoint's own, and it is called on the rest. Which
checkpoints there are is image_checkpoints' choice; where this component is off, that one ends the chunk.
"""

from vllm_mmcache.hooking.component import Component

COMPONENT = Component(
    "inner_checkpoints",
    __name__,
    hooks={"engine": ("hooks",), "worker": ("hooks_worker",)},
    rule="rules:state_in",
    on_install={"engine": "vllm_blocks"},
    needs="image_checkpoints",
    images_only=True,
    proven_per="device",
    on_if="if the model, when it is loaded, has Qwen's GDN as its only kind of Mamba layers",
)
