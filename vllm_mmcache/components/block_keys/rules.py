# SPDX-License-Identifier: Apache-2.0
"""What a configuration says of this component. Any process, at start."""

from typing import Any

from vllm_mmcache.base.status import State
from vllm_mmcache.components.block_keys.layouts import CUMULATIVE, layout_report


def state_in(vllm_config: Any) -> State | None:
    """Keys have nothing to do where nothing is cached, and stay vLLM's own under some hash algorithms."""
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching:
        return State("unneeded", "prefix caching is off")
    ahead = getattr(vllm_config, "num_hash_lookahead_tokens", 0)  # not in 0.32
    layout, why = layout_report(cache.prefix_caching_hash_algo, num_lookahead_tokens=ahead)
    return None if layout == CUMULATIVE else State("off", why)
