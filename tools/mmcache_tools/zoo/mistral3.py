# SPDX-License-Identifier: Apache-2.0
"""Mistral Small 3.1 with Pixtral's vision: each row of a picture ends with a token of its own, without an embedding.

Plain data from the standard library, like every family.
"""

from __future__ import annotations

from typing import Any

from mmcache_tools.zoo.configs import CLIP_MEAN, CLIP_STD, HIDDEN, MAX_POSITION, NUM_LAYERS, ZooOptions
from mmcache_tools.zoo.family import Family

_SPECIALS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
)  # fmt: skip


def _config(ids: dict[str, int], vocab_size: int, options: ZooOptions) -> dict[str, Any]:
    text = {
        "model_type": "mistral",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": MAX_POSITION,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000000.0},
        "sliding_window": None,
        "bos_token_id": ids["<s>"],
        "eos_token_id": ids["</s>"],
        "tie_word_embeddings": False,
    }
    vision = {
        "model_type": "pixtral",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "image_size": 1540,
        "num_channels": 3,
        "patch_size": 14,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
    }
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "image_token_index": ids["[IMG]"],
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
    }


def _processor_files(options: ZooOptions) -> dict[str, dict[str, Any]]:
    image = {
        "image_processor_type": "PixtralImageProcessorFast",
        "processor_class": "PixtralProcessor",
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "patch_size": 14,
        "size": {"longest_edge": 1540},
    }
    processor = {
        "processor_class": "PixtralProcessor",
        "patch_size": 14,
        "spatial_merge_size": 2,
        "image_token": "[IMG]",
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
    }
    return {"preprocessor_config.json": image, "processor_config.json": processor}


def _centre_and_std(name: str, num_dims: int) -> tuple[float, float] | None:
    if name.endswith(".ln_pre.weight"):
        return 1.0, 0.1
    return None


MISTRAL3 = Family(
    "mistral3", _SPECIALS, (),
    {
        "tokenizer_class": "PreTrainedTokenizerFast", "processor_class": "PixtralProcessor", "bos_token": "<s>",
        "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>",
    },
    "mistral3.jinja", _config, _processor_files, (), bos="<s>", eos="</s>", image_token="[IMG]",
    image_inside=("[IMG_BREAK]",), centre_and_std=_centre_and_std,
)  # fmt: skip
