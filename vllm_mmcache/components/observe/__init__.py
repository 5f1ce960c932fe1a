# SPDX-License-Identifier: Apache-2.0
"""Shows what the components count, and says of each request what was reused.

Reads counters; no component imports it.
"""

from vllm_mmcache.hooking.component import Component

COMPONENT = Component(
    "observe",
    __name__,
    hooks={"api": ("hooks_api",), "engine": ("hooks_engine",)},
    needs="metrics",
    opt_in=True,
)
