# SPDX-License-Identifier: Apache-2.0
"""What vLLM's configuration says that features depend on, and why a model runner has no feature store.

Worker process, once at start. Reads vLLM's objects and changes none.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_mmcache.base import settings
from vllm_mmcache.components.lazy_processing.vllm_processor_facts import processing_facts
from vllm_mmcache.content.digests import canonical_text, inputs_digest

_NOT_THE_TOWERS = frozenset({"text_config", "llm_config", "_name_or_path", "transformers_version"})


def why_not(runner: Any) -> str:
    """Why there is no feature store for this model runner; empty if there can be one. See lifecycle/config_rules.py."""
    from vllm.v1.worker.gpu.ec_connector import ECConnector
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    is_v2 = isinstance(getattr(runner, "ec_connector", None), ECConnector)
    if not is_v2 and not isinstance(runner, GPUModelRunner):
        return f"not written for this model runner, {type(runner).__module__}"
    return "" if runner.supports_mm_inputs else "this deployment takes no images"


@dataclass(frozen=True)
class RankPosition:
    """A worker's place among those that encode: each tensor-parallel rank of the first pipeline stage."""

    encodes: bool
    row: int
    """Of the arena's board."""


def place_of(vllm_config: Any) -> RankPosition:
    """Where this worker stands in its groups (vllm/distributed/parallel_state.py), which must be there."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return RankPosition(encodes=get_pp_group().is_first_rank, row=get_tp_group().rank_in_group)


def facts_of(vllm_config: Any, device: torch.device) -> dict[str, str]:
    """What features depend on beside image and weights, for `Identity`; each a digest or a short text."""
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.version import __version__

    model_config, mm_config = vllm_config.model_config, vllm_config.model_config.multimodal_config
    hf_config = model_config.hf_config
    model = {
        "architectures": hf_config.architectures,
        # What it says of the language model alone is left out, so that features outlive a longer context.
        "config": {k: v for k, v in hf_config.to_dict().items() if k not in _NOT_THE_TOWERS},
        "attention": mm_config.mm_encoder_attn_backend,
        "attention dtype": mm_config.mm_encoder_attn_dtype,
        "fp8 scales": _content(mm_config.mm_encoder_fp8_scale_path),
        "quantization": model_config.quantization,
        "platform": current_platform.device_type,
        "device": _device(device),
        "torch": torch.__version__,
        "vllm": __version__,
    }
    less_usual = {
        "one by one": settings.current().tower_one_by_one,
        "compiled": vllm_config.compilation_config.compile_mm_encoder,
        "float32 products": envs.VLLM_FLOAT32_MATMUL_PRECISION != "highest" and envs.VLLM_FLOAT32_MATMUL_PRECISION,
        "batch invariant": bool(envs.VLLM_BATCH_INVARIANT),
    }
    model |= {name: value for name, value in less_usual.items() if value}  # so that features keep the keys they have
    return {
        "model": inputs_digest({name: canonical_text(value) for name, value in model.items()}),
        "processor": inputs_digest(processing_facts(model_config)),
        "dtype": str(model_config.dtype).removeprefix("torch."),
        "layout": f"{mm_config.mm_encoder_tp_mode}/{vllm_config.parallel_config.tensor_parallel_size}",
    }


def _device(device: torch.device) -> str:
    """What decides between kernels: name and capability of a GPU, the instructions of a CPU."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name} {properties.major}.{properties.minor}"
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"


def _content(path: Any) -> str | None:
    return Path(path).read_text(encoding="utf-8") if path is not None else None
