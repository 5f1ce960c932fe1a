# SPDX-License-Identifier: Apache-2.0
"""What vLLM's configuration says that features depend on, and why a model runner has no feature store.

Worker process, once at start. Reads vLLM's objects and changes none.
"""

import json
from pathlib import Path
from typing import Any

import torch

from vllm_mmcache.features.digests import inputs_digest
from vllm_mmcache.features.room import Facts, Layout

_NOT_THE_TOWERS = frozenset({"text_config", "llm_config", "_name_or_path", "transformers_version"})


def why_not(runner: Any) -> str:
    """Why there is no feature store for this model runner; empty if there can be one. See upstream/configuration.py."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if not isinstance(runner, GPUModelRunner) and not hasattr(getattr(runner, "model_state", None), "encoder_runner"):
        return f"not written for this model runner, {type(runner).__module__}"
    return "" if runner.supports_mm_inputs else "this deployment takes no images"


def facts_of(vllm_config: Any) -> Facts:
    """What features depend on beside image and weights."""
    from vllm.platforms import current_platform
    from vllm.version import __version__

    model_config, mm_config = vllm_config.model_config, vllm_config.model_config.multimodal_config
    hf_config = model_config.hf_config
    return Facts(
        model=_text(
            {
                "architectures": hf_config.architectures,
                # What it says of the language model alone is left out, so that features outlive a longer context.
                "config": {k: v for k, v in hf_config.to_dict().items() if k not in _NOT_THE_TOWERS},
                "attention": mm_config.mm_encoder_attn_backend,
                "attention dtype": mm_config.mm_encoder_attn_dtype,
                "fp8 scales": _content(mm_config.mm_encoder_fp8_scale_path),
                "sharding": mm_config.mm_encoder_tp_mode,
                "quantization": model_config.quantization,
                "platform": current_platform.device_type,
                "vllm": __version__,
            }
        ),
        processor=inputs_digest(
            {"settings": _text(model_config.hf_image_processor_config), "given": _text(mm_config.mm_processor_kwargs)}
        ),
        dtype=str(model_config.dtype).removeprefix("torch."),
    )


def layout() -> Layout:
    """This worker's place in its tensor-parallel group, and how the group agrees on what every rank has."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()

    def agree(has: list[bool]) -> list[bool]:
        if group.world_size == 1 or not has:
            return has
        mask = torch.tensor(has, dtype=torch.int32)
        torch.distributed.all_reduce(mask, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        return [bool(one) for one in mask.tolist()]

    return Layout(group.rank_in_group, group.world_size, agree)


def _content(path: Any) -> str | None:
    return Path(path).read_text(encoding="utf-8") if path is not None else None


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
