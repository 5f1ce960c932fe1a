# SPDX-License-Identifier: Apache-2.0
"""Records for each request what was reused and why the rest was not. API server and engine.

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
