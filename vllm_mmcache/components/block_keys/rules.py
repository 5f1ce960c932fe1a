# SPDX-License-Identifier: Apache-2.0
"""What a configuration says of this component. Any process, at start."""

from typing import Any

from vllm_mmcache.base.status import State


def state_in(vllm_config: Any) -> State | None:
    """Keys have nothing to do where nothing is cached."""
    return None if vllm_config.cache_config.enable_prefix_caching else State("unneeded", "prefix caching is off")
