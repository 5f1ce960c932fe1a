# SPDX-License-Identifier: Apache-2.0
"""What a configuration says of this component. Any process, at start."""

from typing import Any

from vllm_mmcache.base import settings
from vllm_mmcache.base.status import State


def state_in(vllm_config: Any) -> State | None:
    """Features are off where what the tower makes of an image depends on more than the image."""
    mm_config, parallel = vllm_config.model_config.multimodal_config, vllm_config.parallel_config
    if not vllm_config.cache_config.enable_prefix_caching:
        return State("off", "prefix caching is off")
    if vllm_config.ec_transfer_config is not None:
        return State("off", "ec_transfer_config is set, and wins")
    if parallel.prefill_context_parallel_size > 1:
        return State("off", "not written for context parallelism in prefill")
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        return State("off", "each rank of an external launcher has an engine of its own")
    if parallel.enable_elastic_ep:
        return State("off", "not written for elastic expert parallelism, which puts weights into workers later")
    if mm_config.mm_processor_cache_type == "shm" and settings.current().identity is False:
        why = "with mm_processor_cache_type=shm the engine can't see what an image shows, and identity, which says it"
        return State("off", f"{why}, is switched off")
    if vllm_config.lora_config is not None and vllm_config.lora_config.enable_tower_connector_lora:
        return State("off", "LoRA adapters can change the vision tower")
    if mm_config.is_multimodal_pruning_enabled():
        return State("off", "features are pruned")
    if mm_config.mm_encoder_attn_dtype == "fp8" and mm_config.mm_encoder_fp8_scale_path is None:
        why = "the tower's fp8 scales follow what it has seen (mm_encoder_fp8_scale_path gives fixed ones)"
        return State("off", why)
    return None
