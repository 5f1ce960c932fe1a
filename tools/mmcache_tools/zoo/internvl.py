# SPDX-License-Identifier: Apache-2.0
"""InternVL 3.5 in the form that Transformers reads: a picture is cut into tiles and one small view of the whole.

Plain data from the standard library, like every family; the tiles are 112 pixels wide in place of 448, so that a
picture of 224x224 pixels has four of them and the view, 80 tokens in one run.
"""

from __future__ import annotations

from typing import Any

from mmcache_tools.zoo.configs import CLIP_MEAN, CLIP_STD, HIDDEN, MAX_POSITION, NUM_LAYERS, ZooOptions
from mmcache_tools.zoo.families import QWEN_THINK, QWEN_TOOLS, qwen_tokenizer
from mmcache_tools.zoo.family import Family

_TILE = 112  # pixels
_PATCH = 14  # pixels
_TILE_TOKENS = (_TILE // _PATCH // 2) ** 2  # downsample_ratio 0.5 in both directions

_SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>", "<quad>", "</quad>",
    "<ref>", "</ref>", "<box>", "</box>",
)  # fmt: skip
_NAMED = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}


def _config(ids: dict[str, int], vocab_size: int, options: ZooOptions) -> dict[str, Any]:
    text = {
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_POSITION,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "tie_word_embeddings": False,
    }
    vision = {
        "model_type": "internvl_vision",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "attention_bias": True,
        "use_qk_norm": False,
        "norm_type": "layer_norm",
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "image_size": [_TILE, _TILE],
        "patch_size": [_PATCH, _PATCH],
        "use_absolute_position_embeddings": True,
        "use_mean_pooling": True,
    }
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "image_token_id": ids["<IMG_CONTEXT>"],
        "image_seq_length": _TILE_TOKENS,
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
    }


def _processor_files(options: ZooOptions) -> dict[str, dict[str, Any]]:
    both = {
        "processor_class": "InternVLProcessor",
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "size": {"height": _TILE, "width": _TILE},
    }
    image = both | {
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "crop_to_patches": True,
        "min_patches": 1,
        "max_patches": 12,
    }
    return {
        "preprocessor_config.json": image,
        "video_preprocessor_config.json": both | {"video_processor_type": "InternVLVideoProcessor"},
        "processor_config.json": {"processor_class": "InternVLProcessor", "image_seq_length": _TILE_TOKENS},
    }


def _centre_and_std(name: str, num_dims: int) -> tuple[float, float] | None:
    if name.endswith((".lambda_1", ".lambda_2")):
        return 1.0, 0.1
    return None


INTERNVL = Family(
    "internvl", _SPECIALS, QWEN_TOOLS + QWEN_THINK,
    qwen_tokenizer("Qwen2Tokenizer", "InternVLProcessor") | {"extra_special_tokens": _NAMED} | _NAMED,
    "internvl.jinja", _config, _processor_files, (), image_token="<IMG_CONTEXT>", takes_video=True,
    centre_and_std=_centre_and_std,
)  # fmt: skip
