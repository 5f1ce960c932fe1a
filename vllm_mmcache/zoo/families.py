# SPDX-License-Identifier: Apache-2.0
"""The model families of the zoo: special tokens, which configuration, and how the weights are named and drawn.

Everything here is plain data made from the standard library, so that listing the families is free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_mmcache.zoo.configs import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    ZooOptions,
    gemma3,
    gemma_processor,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_5,
    qwen3_vl,
    qwen_processor,
    seeing,
)


@dataclass(frozen=True)
class Draw:
    """Standard deviations of the random weights, tuned so that pictures move the output (tests/zoo checks it)."""

    embedding: float = 1.0
    matrix: float = 0.08
    lm_head: float = 0.25
    qk_norm: float = 1.5  # scale of the query and key norms: sharper attention than 1.0, so single patches count
    norm_centre: float = 1.0  # 0.0 where the family's RMSNorm multiplies by (1 + weight)
    post_norm: float = 0.0  # Gemma: weight of the norms after attention and MLP, which sets the size of updates
    final_norm: float | None = None


@dataclass(frozen=True)
class Family:
    """One family: its special tokens, the makers of its JSON files, and how its checkpoint is named and drawn."""

    name: str
    specials: tuple[str, ...]
    plain_added: tuple[str, ...]  # added tokens that are not special: they stay in decoded text
    tokenizer: dict[str, Any]  # tokenizer_config.json, without the chat template
    template: str  # file name under zoo/templates
    config: Callable[[dict[str, int], int, ZooOptions], dict[str, Any]]
    processor_files: Callable[[ZooOptions], dict[str, dict[str, Any]]]
    rename: tuple[tuple[str, str], ...]  # prefixes: Transformers module -> key in published checkpoints
    draw: Draw = field(default_factory=Draw)
    dtype: str = "float32"
    bos: str | None = None
    eos: str = "<|im_end|>"
    trained: str | None = None  # folder under zoo/ with the tokenizer and weights; None: both are made from the seed


QWEN2_VL_SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
QWEN_TOOLS = ("<tool_call>", "</tool_call>")
QWEN_THINK = ("<think>", "</think>")
GEMMA_SPECIALS = (
    "<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>",
    "<end_of_image>", "<image_soft_token>",
)  # fmt: skip
# vLLM looks these up by text when it merges the newlines around two neighbouring pictures.
GEMMA_NEWLINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")


_QWEN2_RENAME = (("model.visual.", "visual."), ("model.language_model.", "model."))
_GEMMA_RENAME = (
    # Published Gemma 3 checkpoints have `vision_model.`; Transformers 5.19 has no such module and would save the
    # keys without it, which vLLM 0.32 can't read. Both map the published names.
    ("model.vision_tower.", "vision_tower.vision_model."),
    ("model.language_model.", "language_model.model."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)
_GEMMA_TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}


def _qwen_tokenizer(cls: str, processor: str) -> dict[str, Any]:
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return {"tokenizer_class": cls, "processor_class": processor, "add_prefix_space": False} | special


_ALL = (
    Family(
        "qwen2-vl", QWEN2_VL_SPECIALS, (), _qwen_tokenizer("Qwen2Tokenizer", "Qwen2VLProcessor"), "qwen2_vl.jinja",
        qwen2_vl, qwen_processor("Qwen2VLProcessor", "Qwen2VLVideoProcessor", 14, CLIP_MEAN, CLIP_STD, 56 * 56),
        _QWEN2_RENAME,
    ),
    Family(
        "qwen2.5-vl", QWEN2_VL_SPECIALS, QWEN_TOOLS, _qwen_tokenizer("Qwen2Tokenizer", "Qwen2_5_VLProcessor"),
        "qwen2_vl.jinja", qwen2_5_vl,
        qwen_processor("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", 14, CLIP_MEAN, CLIP_STD, 56 * 56),
        _QWEN2_RENAME,
    ),
    Family(
        "qwen3-vl", QWEN2_VL_SPECIALS, QWEN_TOOLS + QWEN_THINK,
        _qwen_tokenizer("Qwen2Tokenizer", "Qwen3VLProcessor"), "qwen3_vl.jinja", qwen3_vl,
        qwen_processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16, HALF, HALF, 256 * 256), (),
    ),
    Family(
        "qwen3.5", QWEN2_VL_SPECIALS, QWEN_TOOLS + QWEN_THINK,
        _qwen_tokenizer("Qwen3_5Tokenizer", "Qwen3VLProcessor"), "qwen3_5.jinja", qwen3_5,
        qwen_processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16, HALF, HALF, 256 * 256), (),
        draw=Draw(norm_centre=0.0, qk_norm=0.5), dtype="bfloat16",
    ),
    Family(
        "gemma3", GEMMA_SPECIALS, GEMMA_NEWLINES,
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "processor_class": "Gemma3Processor",
            "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>",
            "extra_special_tokens": _GEMMA_TOKENS, **_GEMMA_TOKENS,
        },
        "gemma3.jinja", gemma3, gemma_processor, _GEMMA_RENAME,
        draw=Draw(embedding=0.06, norm_centre=0.0, qk_norm=0.5, post_norm=9.0, final_norm=2.0), bos="<bos>",
        eos="<end_of_turn>",
    ),
)  # fmt: skip

# Every square picture becomes 96x96 pixels, the size it was trained on: 9 tokens.
_SEEING_PIXELS = ZooOptions(max_pixels=96 * 96)
_SEEING_PROCESSOR = qwen_processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16, HALF, HALF, 96 * 96)

_TRAINED = (
    Family(
        "seeing", QWEN2_VL_SPECIALS, QWEN_TOOLS + QWEN_THINK,
        _qwen_tokenizer("Qwen2Tokenizer", "Qwen3VLProcessor"), "qwen3_vl.jinja", seeing,
        lambda options: _SEEING_PROCESSOR(_SEEING_PIXELS), (), trained="seeing",
    ),
)  # fmt: skip

BY_NAME: dict[str, Family] = {family.name: family for family in (*_ALL, *_TRAINED)}
FAMILIES: tuple[str, ...] = tuple(family.name for family in _ALL)  # random weights: one for each architecture
TRAINED: tuple[str, ...] = tuple(family.name for family in _TRAINED)
