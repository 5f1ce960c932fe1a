# SPDX-License-Identifier: Apache-2.0
"""A digest of what else in a VllmConfig decides how an engine computes, beside what a ProofScope names. Any process."""

import json
import os
import re
from typing import Any

from blake3 import blake3

_MODEL = ("model", "revision", "dtype", "quantization", "enforce_eager", "max_model_len", "hf_overrides")
_PARTS = {
    "cache_config": (
        "cache_dtype",
        "kv_cache_dtype_skip_layers",
        "mamba_cache_mode",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
    ),
    "load_config": ("load_format",),
    "kernel_config": ("moe_backend", "linear_backend"),
    "kv_transfer_config": ("kv_connector", "kv_role"),
    "compilation_config": ("mode", "cudagraph_mode", "backend", "custom_ops", "splitting_ops"),
    "attention_config": (),
    "scheduler_config": (
        "max_num_batched_tokens",
        "enable_chunked_prefill",
        "policy",
        "max_num_scheduled_tokens",
        "disable_hybrid_kv_cache_manager",
    ),
    "parallel_config": (
        "data_parallel_size",
        "enable_expert_parallel",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "all2all_backend",
        "use_ubatching",
    ),
    "speculative_config": ("method", "model", "num_speculative_tokens"),
    "lora_config": (),
}
"""Parts of a VllmConfig, and what of them counts; all of a part where nothing is named."""
_VARIABLES = re.compile(r"VLLM_(.*(ATTENTION|FLASH|KERNEL|INVARIANT|MOE|GEMM).*)")
"""Variables that choose kernels."""


def digest(vllm_config: Any) -> str:
    """16 hex digits, the same for engines that are configured alike, before and after the model was loaded.

    Another model at the same path has other ones.
    """
    model_config = vllm_config.model_config
    facts: dict[str, Any] = {name: getattr(model_config, name, None) for name in _MODEL}
    facts["hf_config"] = model_config.hf_config.to_dict()
    facts["multimodal"] = vars(model_config.multimodal_config) if model_config.multimodal_config else None
    for part, names in _PARTS.items():
        found = getattr(vllm_config, part, None)
        facts[part] = found if found is None or not names else {name: getattr(found, name, None) for name in names}
    cache = vllm_config.cache_config
    # One that vLLM chooses is known when the layers are made, and a hybrid model changes any: not at every call.
    has_chosen = getattr(cache, "user_specified_block_size", False) and not model_config.is_hybrid
    facts["block_size"] = cache.block_size if has_chosen else None
    facts["variables"] = {name: value for name, value in os.environ.items() if _VARIABLES.fullmatch(name)}
    return blake3(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
