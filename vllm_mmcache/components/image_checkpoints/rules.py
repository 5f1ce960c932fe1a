# SPDX-License-Identifier: Apache-2.0
"""What a configuration says of this component. Any process, at start."""

from typing import Any

from vllm_mmcache.base.status import State

_DRAFTERS: dict[tuple[bool, bool], frozenset[str]] = {
    (False, False): frozenset({"ngram", "eagle"}),
    (False, True): frozenset({"eagle", "draft_model"}),  # ngram is a kernel that Triton's interpreter can't run
    (True, False): frozenset(),
    (True, True): frozenset({"mtp"}),
}
"""Drafters with which checkpoints were shown to be right, by whether the model is a hybrid, and the runner V2."""


def state_in(vllm_config: Any) -> State | None:
    """Checkpoints are off beside what they were not shown to be right with."""
    parallel = vllm_config.parallel_config
    if not vllm_config.cache_config.enable_prefix_caching:
        return State("unneeded", "prefix caching is off")
    speculative, transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
    is_hybrid = vllm_config.model_config.is_hybrid
    if speculative is not None:
        is_v2 = vllm_config.use_v2_model_runner
        if is_hybrid and not is_v2:
            why = "wrong prefix hits of Mamba states are reported with speculative decoding (vLLM 53912)"
            return State("off", why)
        if speculative.method not in _DRAFTERS[is_hybrid, is_v2]:
            where = (" on a hybrid model" if is_hybrid else "") + (" on model runner V2" if is_v2 else "")
            return State("off", f"not shown to be right with speculative decoding by {speculative.method}{where}")
    if transfer is not None:
        if is_hybrid:
            return State("off", "with a KV connector, vLLM uses a Mamba state before the load that brings it")
        if speculative is not None:
            return State("off", "not shown to be right with a KV connector and speculative decoding together")
        if vllm_config.scheduler_config.async_scheduling and not vllm_config.use_v2_model_runner:
            return State("off", "with a KV connector, not shown to be right with async scheduling on model runner V1")
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return State("off", "not shown to be right with context parallelism")
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        return State("off", "which checkpoints pay is measured, and each rank of an external launcher measures its own")
    return None
