# SPDX-License-Identifier: Apache-2.0
"""The first families of the zoo, and the one that sees: special tokens, which configuration, how weights are drawn.

Everything here is plain data made from the standard library, so that listing the families is free.
"""

from __future__ import annotations

from typing import Any

from mmcache_tools.zoo.configs import (
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
from mmcache_tools.zoo.family import Draw, Family

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


def qwen_tokenizer(cls: str, processor: str) -> dict[str, Any]:
    """The tokenizer_config.json of a Qwen family, with these names of classes of Transformers."""
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return {"tokenizer_class": cls, "processor_class": processor, "add_prefix_space": False} | special


FIRST = (
    Family(
        "qwen2-vl", QWEN2_VL_SPECIALS, (), qwen_tokenizer("Qwen2Tokenizer", "Qwen2VLProcessor"), "qwen2_vl.jinja",
        qwen2_vl, qwen_processor("Qwen2VLProcessor", "Qwen2VLVideoProcessor", 14, CLIP_MEAN, CLIP_STD, 56 * 56),
        _QWEN2_RENAME, takes_video=True,
    ),
    Family(
        "qwen2.5-vl", QWEN2_VL_SPECIALS, QWEN_TOOLS, qwen_tokenizer("Qwen2Tokenizer", "Qwen2_5_VLProcessor"),
        "qwen2_vl.jinja", qwen2_5_vl,
        qwen_processor("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", 14, CLIP_MEAN, CLIP_STD, 56 * 56),
        _QWEN2_RENAME, takes_video=True,
    ),
    Family(
        "qwen3-vl", QWEN2_VL_SPECIALS, QWEN_TOOLS + QWEN_THINK,
        qwen_tokenizer("Qwen2Tokenizer", "Qwen3VLProcessor"), "qwen3_vl.jinja", qwen3_vl,
        qwen_processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16, HALF, HALF, 256 * 256), (), takes_video=True,
    ),
    Family(
        "qwen3.5", QWEN2_VL_SPECIALS, QWEN_TOOLS + QWEN_THINK,
        qwen_tokenizer("Qwen3_5Tokenizer", "Qwen3VLProcessor"), "qwen3_5.jinja", qwen3_5,
        qwen_processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16, HALF, HALF, 256 * 256), (),
        draw=Draw(norm_centre=0.0, qk_norm=0.5), dtype="bfloat16", takes_video=True, keeps_all_kv=False,
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
        eos="<end_of_turn>", image_token="<image_soft_token>", keeps_all_kv=False,
    ),
)  # fmt: skip

# Every square picture becomes 96x96 pixels, the size it was trained on: 9 tokens.
_SEEING_PIXELS = ZooOptions(max_pixels=96 * 96)
_SEEING_PROCESSOR = qwen_processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16, HALF, HALF, 96 * 96)

TRAINED = (
    Family(
        "seeing", QWEN2_VL_SPECIALS, QWEN_TOOLS + QWEN_THINK,
        qwen_tokenizer("Qwen2Tokenizer", "Qwen3VLProcessor"), "qwen3_vl.jinja", seeing,
        lambda options: _SEEING_PROCESSOR(_SEEING_PIXELS), (), trained="seeing", takes_video=True,
    ),
)  # fmt: skip
