# SPDX-License-Identifier: Apache-2.0
"""A digest of what else in a VllmConfig decides how an engine computes, beside what a ProofScope names. Any process."""

import json
import os
import re
import weakref
from typing import Any

from blake3 import blake3

_MODEL = ("model", "revision", "dtype", "quantization", "enforce_eager")
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


_digests: dict[int, str] = {}
"""Of each VllmConfig of this process, by its id."""


def digest(vllm_config: Any) -> str:
    """16 hex digits, the same for engines that are configured alike.

    A model at the same path with another config of its own has other ones; weights are not looked at. The digest is
    made at the first call for a VllmConfig and remembered. Where a start looks for proofs that is before the model is
    loaded, during which vLLM writes what it chooses into the VllmConfig.
    """
    known = _digests.get(id(vllm_config))
    if known is None:
        known = _digests[id(vllm_config)] = digest_now(vllm_config)
        weakref.finalize(vllm_config, _digests.pop, id(vllm_config), None)
    return known


def digest_now(vllm_config: Any) -> str:
    """The digest of a VllmConfig as it is now; not remembered."""
    model_config, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    facts: dict[str, Any] = {name: getattr(model_config, name, None) for name in _MODEL}
    # With -1, vLLM takes what fits the memory that is free at this start.
    is_fitted = getattr(model_config, "original_max_model_len", None) == -1
    facts["max_model_len"] = -1 if is_fitted else model_config.max_model_len
    facts["hf_config"] = model_config.hf_config.to_dict()  # with what hf_overrides has changed
    facts["multimodal"] = vars(model_config.multimodal_config) if model_config.multimodal_config else None
    for part, names in _PARTS.items():
        found = getattr(vllm_config, part, None)
        facts[part] = found if found is None or not names else {name: getattr(found, name, None) for name in names}
    # Data-parallel engines of a model that is no mixture of experts run independently.
    facts["data_parallel_size"] = parallel.data_parallel_size if model_config.is_moe else 1
    # A block size that vLLM chooses depends on the attention backend and on the sizes of Mamba states.
    has_chosen = getattr(cache, "user_specified_block_size", False)
    facts["block_size"] = cache.block_size if has_chosen else None
    facts["variables"] = {name: value for name, value in os.environ.items() if _VARIABLES.fullmatch(name)}
    return blake3(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
