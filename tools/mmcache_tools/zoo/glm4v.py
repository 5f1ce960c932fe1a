# SPDX-License-Identifier: Apache-2.0
"""GLM-4.1V (and 4.6V-Flash, of the same class): M-RoPE on interleaved pairs, norms on both sides of each block.

Plain data from the standard library, like every family.
"""

from __future__ import annotations

from typing import Any

from mmcache_tools.zoo.configs import CLIP_MEAN, CLIP_STD, HIDDEN, MAX_POSITION, NUM_LAYERS, ZooOptions
from mmcache_tools.zoo.families import QWEN_THINK
from mmcache_tools.zoo.family import Family

_SPECIALS = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    "<|image|>", "<|video|>",
)  # fmt: skip
_ANSWER = ("<answer>", "</answer>")


def _config(ids: dict[str, int], vocab_size: int, options: ZooOptions) -> dict[str, Any]:
    # Half of each head turns: 16 pairs, shared out among time, height and width.
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [4, 6, 6]}
    text = {
        "model_type": "glm4v_text",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": MAX_POSITION,
        "rope_parameters": rope,
        "pad_token_id": ids["<|endoftext|>"],
        "eos_token_id": [ids["<|endoftext|>"], ids["<|user|>"], ids["<|observation|>"]],
    }
    vision = {
        "model_type": "glm4v_vision",
        "depth": 2,
        "hidden_size": 128,
        "out_hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_heads": 2,
        "hidden_act": "silu",
        "attention_bias": False,
        "image_size": 336,
        "in_channels": 3,
        "patch_size": 14,
        "rms_norm_eps": 1e-5,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    return {
        "architectures": ["Glm4vForConditionalGeneration"],
        "model_type": "glm4v",
        "image_token_id": ids["<|image|>"],
        "image_start_token_id": ids["<|begin_of_image|>"],
        "image_end_token_id": ids["<|end_of_image|>"],
        "video_token_id": ids["<|video|>"],
        "video_start_token_id": ids["<|begin_of_video|>"],
        "video_end_token_id": ids["<|end_of_video|>"],
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
    }


def _processor_files(options: ZooOptions) -> dict[str, dict[str, Any]]:
    both = {
        "processor_class": "Glm4vProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    }
    # The sizes count the pixels of two frames: a picture is seen as two equal ones.
    size = {"shortest_edge": 112 * 112, "longest_edge": 2 * options.max_pixels}
    return {
        "preprocessor_config.json": both | {"image_processor_type": "Glm4vImageProcessorFast", "size": size},
        "video_preprocessor_config.json": both | {"video_processor_type": "Glm4vVideoProcessor", "size": size},
    }


GLM4V = Family(
    "glm4v", _SPECIALS, QWEN_THINK + _ANSWER,
    {
        "tokenizer_class": "PreTrainedTokenizerFast", "processor_class": "Glm4vProcessor", "padding_side": "left",
        "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>",
    },
    "glm4v.jinja", _config, _processor_files, (), eos="<|user|>", image_token="<|image|>", takes_video=True,
)  # fmt: skip
