# SPDX-License-Identifier: Apache-2.0
"""Qwen3-VL and Qwen3.5 with experts: Qwen3-VL-30B-A3B and Qwen3.6-35B-A3B, small.

As published but for the sizes: every layer has experts, of which each token takes two out of eight (published: 8 out
of 128 or 256); Qwen3.5 has a shared expert with a gate beside them. Plain data from the standard library alone.

A random router makes near-ties, where rounding chooses the expert. So its logits are spread widely: the first expert
has 0.86 of the weight on average, and one that takes the place of the second changes little. In bfloat16 (Qwen3.5)
rounding is 0.4 %, so there the experts write a quarter of what they do in float32. Turning the router round still moves
log-probabilities by 2.5, and bfloat16 moves them no more than without experts (0.12 on average; 0.15 in qwen3.5).
"""

from __future__ import annotations

from typing import Any

from mmcache_tools.zoo.configs import HALF, ZooOptions, qwen3_5, qwen3_vl, qwen_processor
from mmcache_tools.zoo.families import QWEN2_VL_SPECIALS, QWEN_THINK, QWEN_TOOLS, qwen_tokenizer
from mmcache_tools.zoo.family import Draw, Family

_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_ROUTER = 0.4  # standard deviation; the router's input has a norm of about 16, so its logits are spread by 6.4
_DOWN_BF16 = 0.02  # standard deviation of the experts' last matrix; Draw.matrix in float32


def qwen3_vl_moe(ids: dict[str, int], vocab_size: int, options: ZooOptions) -> dict[str, Any]:
    """As qwen3_vl, with eight experts in every layer in place of its MLP."""
    config = qwen3_vl(ids, vocab_size, options)
    text = {"model_type": "qwen3_vl_moe_text", "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
    config["text_config"] |= text | _EXPERTS
    config["vision_config"]["model_type"] = "qwen3_vl_moe_vision"
    return config | {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe"}


def qwen3_5_moe(ids: dict[str, int], vocab_size: int, options: ZooOptions) -> dict[str, Any]:
    """As qwen3_5, with eight experts and a shared one in every layer in place of its MLP."""
    config = qwen3_5(ids, vocab_size, options)
    del config["text_config"]["intermediate_size"]  # no layer is without experts
    config["text_config"] |= {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 64} | _EXPERTS
    config["vision_config"]["model_type"] = "qwen3_5_moe_vision"
    return config | {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}


def router(name: str, num_dims: int) -> tuple[float, float] | None:
    """Mean and standard deviation of the router; None for the rest."""
    return (0.0, _ROUTER) if name.endswith("mlp.gate.weight") else None


def router_and_experts(name: str, num_dims: int) -> tuple[float, float] | None:
    """As `router`, and those of what the experts write."""
    return (0.0, _DOWN_BF16) if name.endswith("mlp.experts.down_proj") else router(name, num_dims)


QWEN_MOE = (
    Family(
        "qwen3-vl-moe", QWEN2_VL_SPECIALS, QWEN_TOOLS + QWEN_THINK,
        qwen_tokenizer("Qwen2Tokenizer", "Qwen3VLProcessor"), "qwen3_vl.jinja", qwen3_vl_moe,
        qwen_processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16, HALF, HALF, 256 * 256), (), takes_video=True,
        transposed=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), centre_and_std=router,
    ),
    Family(
        "qwen3.5-moe", QWEN2_VL_SPECIALS, QWEN_TOOLS + QWEN_THINK,
        qwen_tokenizer("Qwen3_5Tokenizer", "Qwen3VLProcessor"), "qwen3_5.jinja", qwen3_5_moe,
        qwen_processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16, HALF, HALF, 256 * 256), (),
        draw=Draw(norm_centre=0.0, qk_norm=0.5), dtype="bfloat16", takes_video=True, keeps_all_kv=False,
        centre_and_std=router_and_experts,
    ),
)  # fmt: skip
