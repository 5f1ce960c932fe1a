# SPDX-License-Identifier: Apache-2.0
"""The store of encoder outputs: RAM, a directory, Redis or Valkey. Engine and worker processes.

A request whose image the store knows gets the features of the first run instead of a run of the vision tower. A
package is served only when its whole identity is the one asked for, and its bytes are the bytes that were saved.
Only hooks.py and vllm_*.py import vLLM. Nothing here fails a request: whatever goes wrong is a miss that is counted.
"""

from vllm_mmcache.hooking.component import Component

COMPONENT = Component(
    "features",
    __name__,
    hooks={"engine": ("engine.hooks",), "worker": ("worker.hooks",)},
    rule="rules:state_in",
    images_only=True,
    proven_per="device",
    on_if="if the vision tower passes its trial when the model is loaded",
)
