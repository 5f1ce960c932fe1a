# SPDX-License-Identifier: Apache-2.0
"""What a configuration says of this component. Any process, at start."""

from typing import Any

from vllm_mmcache.base.status import State


def state_in(vllm_config: Any) -> State | None:
    """Only a hybrid model has Mamba layers, and without prefix caching nothing is kept."""
    if not vllm_config.model_config.is_hybrid:
        return State("unneeded", "this model has no Mamba layers")
    if not vllm_config.cache_config.enable_prefix_caching:
        return State("unneeded", "prefix caching is off")
    if vllm_config.speculative_config is not None:
        return State("off", "not shown to be right with speculative decoding")
    if vllm_config.kv_transfer_config is not None:
        return State("off", "not shown to be right with a KV connector")
    parallel = vllm_config.parallel_config
    if parallel.use_ubatching:
        return State("off", "not shown to be right with a batch that is computed in two halves")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return State("off", "not shown to be right with context parallelism")
    return None
