# SPDX-License-Identifier: Apache-2.0
"""What the components count, and how it reaches vLLM's /metrics.

`counters` are shown by the API server, `transport` holds what engine and worker have counted until
`hooks` takes it along; `table_sizes` shows how full the tables are. Only hooks.py imports vLLM.
"""

from vllm_mmcache.hooking.component import Component

COMPONENT = Component(
    "metrics",
    __name__,
    hooks={"api": ("hooks",), "engine": ("hooks",), "worker": ("hooks",)},
    proven_per="engine",
)
