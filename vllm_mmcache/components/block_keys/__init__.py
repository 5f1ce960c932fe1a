# SPDX-License-Identifier: Apache-2.0
"""KV block keys that carry the cumulative image state. Engine process; see `layout.py` for the bytes."""

from vllm_mmcache.hooking.component import Component

COMPONENT = Component(
    "block_keys",
    __name__,
    hooks={"engine": ("hooks",)},
    rule="rules:state_in",
    proven_per="engine",
)
