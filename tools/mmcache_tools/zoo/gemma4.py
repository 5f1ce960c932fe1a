# SPDX-License-Identifier: Apache-2.0
"""Gemma 4, as its larger models are (images attend both ways in sliding layers alone) and as the smaller (causal).

The larger ones share keys and values between their projections in full layers; the smaller ones have an input of its
own for each layer and layers that read the KV of earlier ones. A full layer stands before the last one, so what it
lets an image see reaches the answer.
"""

from __future__ import annotations

from typing import Any

from mmcache_tools.zoo.configs import HIDDEN, MAX_POSITION, ZooOptions
from mmcache_tools.zoo.family import Draw, Family

SOFT_TOKENS = 70  # of an image at most, the least that the processor knows; a square picture has 64
LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_MARKS = {
    "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
    "boa_token": "<|audio>", "eoa_token": "<audio|>",
}  # fmt: skip
SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", *_MARKS.values(), "<|video|>")
PATCH, POOL = 16, 3


def _config(ids: dict[str, int], vocab_size: int, options: ZooOptions, own: dict[str, Any]) -> dict[str, Any]:
    text = {
        "model_type": "gemma4_text",
        "vocab_size": vocab_size,
        "vocab_size_per_layer_input": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": len(LAYERS),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "global_head_dim": 128,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-6,
        "sliding_window": options.sliding_window,
        "layer_types": LAYERS,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
        "enable_moe_block": False,
        "pad_token_id": ids["<pad>"],
        "eos_token_id": ids["<eos>"],
        "bos_token_id": ids["<bos>"],
        "tie_word_embeddings": True,
    }
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "patch_size": PATCH,
        "pooling_kernel_size": POOL,
        "position_embedding_size": 256,
        "default_output_length": SOFT_TOKENS,
        "standardize": False,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
    }
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "boi_token_id": ids["<|image>"],
        "eoi_token_id": ids["<image|>"],
        "image_token_id": ids["<|image|>"],
        "video_token_id": ids["<|video|>"],
        "boa_token_id": ids["<|audio>"],
        "eoa_token_index": ids["<audio|>"],
        "eoa_token_id": ids["<audio|>"],
        "audio_token_id": ids["<|audio|>"],
        "eos_token_id": [ids["<eos>"], ids["<turn|>"]],
        "tie_word_embeddings": True,
        "audio_config": None,
        "text_config": text | own,
        "vision_config": vision,
    }


def gemma4(ids: dict[str, int], vocab_size: int, options: ZooOptions) -> dict[str, Any]:
    """As gemma-4-31B: both ways in sliding layers, keys are values in full ones, no input of their own for layers."""
    own = {
        "use_bidirectional_attention": "vision",
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    }
    return _config(ids, vocab_size, options, own)


def gemma4_causal(ids: dict[str, int], vocab_size: int, options: ZooOptions) -> dict[str, Any]:
    """As gemma-4-E2B: causal throughout, an input of its own for each layer, the last layers read earlier ones' KV."""
    own = {
        "use_bidirectional_attention": None,
        "attention_k_eq_v": False,
        "num_global_key_value_heads": None,
        "hidden_size_per_layer_input": 32,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    }
    return _config(ids, vocab_size, options, own)


def processor_files(options: ZooOptions) -> dict[str, dict[str, Any]]:
    """processor_config.json alone, in which Gemma 4 has image, video and audio; `options` changes nothing."""
    pixels = {
        "do_convert_rgb": True, "do_rescale": True, "do_resize": True, "image_mean": [0.0] * 3, "image_std": [1.0] * 3,
        "resample": 3, "rescale_factor": 1 / 255, "max_soft_tokens": SOFT_TOKENS, "patch_size": PATCH,
        "pooling_kernel_size": POOL,
    }  # fmt: skip
    video = {"video_processor_type": "Gemma4VideoProcessor", "do_normalize": True, "num_frames": 32}
    processor = {
        "processor_class": "Gemma4Processor",
        "image_seq_length": SOFT_TOKENS,
        "audio_seq_length": 750,
        "audio_ms_per_token": 40,
        "image_processor": pixels | {"image_processor_type": "Gemma4ImageProcessor", "do_normalize": False},
        "video_processor": pixels | video | {"do_sample_frames": True, "return_metadata": False},
        "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"},
    }
    return {"processor_config.json": processor}


def centre_and_std(name: str, num_dims: int) -> tuple[float, float] | None:
    """Mean and standard deviation of weights that only Gemma 4 has; None for the rest, which weights.py draws."""
    if name.endswith("layer_scalar"):
        return 0.8, 0.1
    if name.endswith("post_per_layer_input_norm.weight"):
        return 5.0, 0.1
    return None


# vLLM lets Gemma 4's template write <bos> and asks the tokenizer not to add one.
_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast", "processor_class": "Gemma4Processor", "bos_token": "<bos>",
    "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "mask_token": "<mask>",
    "extra_special_tokens": _MARKS, **_MARKS,
}  # fmt: skip
# <pad> must be token 0: what vLLM takes for the tokens of an image where each layer has an input of its own.
_DRAW = Draw(embedding=0.06, qk_norm=0.4, post_norm=9.0, final_norm=2.0)

GEMMA4 = Family(
    "gemma4", SPECIALS, (), _TOKENIZER, "gemma4.jinja", gemma4, processor_files, (), draw=_DRAW, bos="<bos>",
    adds_bos=False, eos="<turn|>", image_token="<|image|>", takes_video=True, keeps_all_kv=False,
    centre_and_std=centre_and_std,
)  # fmt: skip
GEMMA4_CAUSAL = Family(
    "gemma4-causal", SPECIALS, (), _TOKENIZER, "gemma4.jinja", gemma4_causal, processor_files, (), draw=_DRAW,
    bos="<bos>", adds_bos=False, eos="<turn|>", image_token="<|image|>", takes_video=True, keeps_all_kv=False,
    centre_and_std=centre_and_std,
)  # fmt: skip
