# SPDX-License-Identifier: Apache-2.0
"""MiniCPM-V 4.6: pictures in slices, numbered within the prompt, on the hybrid text model of Qwen3.5.

Plain data from the standard library, like every family; slices are sized for 168 pixels in place of 448, so that a
picture of 224x224 pixels is cut in two.
"""

from __future__ import annotations

from typing import Any

from mmcache_tools.zoo.configs import HALF, NUM_LAYERS, ZooOptions, qwen3_5
from mmcache_tools.zoo.families import QWEN2_VL_SPECIALS, QWEN_THINK, QWEN_TOOLS, qwen_tokenizer
from mmcache_tools.zoo.family import Draw, Family

_SCALE = 168  # pixels

_NAMED = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}


def _config(ids: dict[str, int], vocab_size: int, options: ZooOptions) -> dict[str, Any]:
    vision = {
        "model_type": "minicpmv4_6_vision",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "image_size": 980,
        "patch_size": 14,
        "num_channels": 3,
    }
    return {
        "architectures": ["MiniCPMV4_6ForConditionalGeneration"],
        "model_type": "minicpmv4_6",
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "insert_layer_id": 0,  # four patches become one behind the first of three layers
        "image_size": 448,
        "drop_vision_last_layer": False,
        "downsample_mode": "16x",
        "tie_word_embeddings": False,
        "text_config": qwen3_5(ids, vocab_size, options)["text_config"] | {"num_hidden_layers": NUM_LAYERS},
        "vision_config": vision,
    }


def _processor_files(options: ZooOptions) -> dict[str, dict[str, Any]]:
    both = {
        "processor_class": "MiniCPMV4_6Processor",
        "image_mean": HALF,
        "image_std": HALF,
        "patch_size": 14,
        "scale_resolution": _SCALE,
        "max_slice_nums": 9,
        "slice_mode": True,
        "use_image_id": True,
        "downsample_mode": "16x",
    }
    return {
        "preprocessor_config.json": both | {"image_processor_type": "MiniCPMV4_6ImageProcessor"},
        "video_preprocessor_config.json": both | {"video_processor_type": "MiniCPMV4_6VideoProcessor"},
    }


MINICPM_V = Family(
    "minicpm-v", (*QWEN2_VL_SPECIALS, *list(_NAMED.values())[2:]), QWEN_TOOLS + QWEN_THINK,
    qwen_tokenizer("Qwen3_5Tokenizer", "MiniCPMV4_6Processor") | {"extra_special_tokens": _NAMED} | _NAMED,
    "minicpm_v.jinja", _config, _processor_files, (), draw=Draw(norm_centre=0.0, qk_norm=0.5), dtype="bfloat16",
    image_inside=("</image>", "<slice>", "</slice>", "\n"), takes_video=True, keeps_all_kv=False,
)  # fmt: skip
