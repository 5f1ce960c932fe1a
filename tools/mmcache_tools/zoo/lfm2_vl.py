# SPDX-License-Identifier: Apache-2.0
"""LFM2-VL: tiles, each behind a token that names its row and column, and a hybrid of short convolutions and attention.

Plain data from the standard library, like every family; tiles are 128 pixels wide in place of 512, and a picture of
224x224 pixels is large enough to be cut into four of them.
"""

from __future__ import annotations

from typing import Any

from mmcache_tools.zoo.configs import HALF, HIDDEN, MAX_POSITION, NUM_LAYERS, ZooOptions
from mmcache_tools.zoo.family import Draw, Family

_TILE = 128  # pixels
_MAX_TILES = 10
_PLACES = tuple(f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11))
_SPECIALS = (
    "<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<|image_start|>",
    "<|image_end|>", "<|img_thumbnail|>", *_PLACES,
)  # fmt: skip
_NAMED = {
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
}
# As with Gemma 3: published keys have `vision_model.`, which Transformers 5 leaves out.
_RENAME = (("model.vision_tower.", "model.vision_tower.vision_model."),)


def _config(ids: dict[str, int], vocab_size: int, options: ZooOptions) -> dict[str, Any]:
    text = {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "norm_eps": 1e-5,
        "max_position_embeddings": MAX_POSITION,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "block_dim": HIDDEN,
        "conv_dim": HIDDEN,
        "conv_L_cache": 3,
        "conv_bias": False,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "pad_token_id": ids["<|pad|>"],
        "bos_token_id": ids["<|startoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "tie_word_embeddings": True,
    }
    vision = {
        "model_type": "siglip2_vision_model",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_patches": 256,
        "patch_size": 16,
        "num_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "vision_use_head": False,
    }
    return {
        "architectures": ["Lfm2VlForConditionalGeneration"],
        "model_type": "lfm2_vl",
        "image_token_id": ids["<image>"],
        "downsample_factor": 2,
        "projector_bias": True,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": HIDDEN,
        "projector_use_layernorm": False,
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": vision,
    }


def _processor_files(options: ZooOptions) -> dict[str, dict[str, Any]]:
    image = {
        "image_processor_type": "Lfm2VlImageProcessorFast",
        "processor_class": "Lfm2VlProcessor",
        "image_mean": HALF,
        "image_std": HALF,
        "tile_size": _TILE,
        "encoder_patch_size": 16,
        "downsample_factor": 2,
        "do_image_splitting": True,
        "min_tiles": 2,
        "max_tiles": _MAX_TILES,
        "min_image_tokens": 4,
        "max_image_tokens": 16,
        "max_pixels_tolerance": 2.0,
        "use_thumbnail": True,
    }
    return {"preprocessor_config.json": image}


# vLLM 0.32's CPU kernel of rotary embeddings turns queries of three dimensions, as LFM2 alone hands them over, by the
# wrong positions: text alone is 3 off in log-probabilities, and a hit is not the cold run. Its PyTorch code is right.
# Remove when: ops.rotary_embedding on the CPU equals RotaryEmbedding.forward_native for (tokens, heads, head size).
_NATIVE_ROPE = (("compilation_config", {"custom_ops": ["all", "-rotary_embedding"]}),)


def _centre_and_std(name: str, num_dims: int) -> tuple[float, float] | None:
    if name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
        return 2.0, 0.1
    if name.endswith("conv.conv.weight"):
        return 0.0, 0.5
    return None


LFM2_VL = Family(
    name="lfm2-vl", specials=_SPECIALS, plain_added=(),
    tokenizer={
        "tokenizer_class": "PreTrainedTokenizerFast", "processor_class": "Lfm2VlProcessor", "eos_token": "<|im_end|>",
        "pad_token": "<|pad|>", "extra_special_tokens": _NAMED, **_NAMED,
    },
    template="lfm2_vl.jinja", config=_config, processor_files=_processor_files, rename=_RENAME, image_token="<image>",
    image_inside=(*_PLACES, "<|img_thumbnail|>"), draw=Draw(embedding=0.3), keeps_all_kv=False,
    engine_arguments=_NATIVE_ROPE, centre_and_std=_centre_and_std,
)  # fmt: skip
