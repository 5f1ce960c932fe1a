# SPDX-License-Identifier: Apache-2.0
"""The JSON configurations of the zoo: small sizes, everything else as the family publishes it.

Head sizes are 64 because vLLM's CPU attention supports 32, 64, 80, 96, ...; rope types, layer patterns, and mean
and standard deviation of the pixels are the family's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
HALF = [0.5, 0.5, 0.5]

HIDDEN = 256
NUM_LAYERS = 4
MAX_POSITION = 16384


@dataclass(frozen=True)
class ZooOptions:
    """What may be set per model; the defaults fit four 1280x720 pictures into 8192 tokens.

    Units: max_pixels in pixels after resizing (Qwen families only); sliding_window in tokens and
    mm_tokens_per_image in tokens, a square number whose root divides 16 (both Gemma 3 only).
    """

    max_pixels: int = 1280 * 784
    sliding_window: int = 128
    mm_tokens_per_image: int = 64


def _qwen_ids(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
    }


def _qwen_text(ids: dict[str, int], vocab_size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_POSITION,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def qwen2_vl(ids: dict[str, int], vocab_size: int, options: ZooOptions) -> dict[str, Any]:
    """The config.json of a small Qwen2-VL. ids: of special tokens, by text; vocab_size: rows of the embedding."""
    # Published Qwen2-VL configs are flat: the text fields stand beside vision_config. Transformers 5 and vLLM
    # both read the nested form too, which is what Transformers writes since 4.52.
    text = _qwen_text(ids, vocab_size)
    rope = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [8, 12, 12]}
    text |= {"model_type": "qwen2_vl_text", "use_sliding_window": False, "rope_parameters": rope}
    vision = {
        "model_type": "qwen2_vl_vision",
        "depth": 2,
        "embed_dim": 128,
        "hidden_size": HIDDEN,
        "hidden_act": "quick_gelu",
        "mlp_ratio": 2,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    head = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
    return head | _qwen_ids(ids) | {"text_config": text, "vision_config": vision}


def qwen2_5_vl(ids: dict[str, int], vocab_size: int, options: ZooOptions) -> dict[str, Any]:
    """As qwen2_vl, for Qwen2.5-VL: its tower attends within windows of 112 pixels in all layers but one."""
    text = _qwen_text(ids, vocab_size)
    rope = {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [8, 12, 12]}
    text |= {"model_type": "qwen2_5_vl_text", "use_sliding_window": False, "rope_parameters": rope}
    vision = {
        "model_type": "qwen2_5_vl_vision",
        "depth": 2,
        "hidden_size": 128,
        "out_hidden_size": HIDDEN,
        "hidden_act": "silu",
        "intermediate_size": 256,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
        "fullatt_block_indexes": [1],  # one layer with windows, one with full attention
    }
    head = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    return head | _qwen_ids(ids) | {"text_config": text, "vision_config": vision}


def _qwen3_vision(model_type: str) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "depth": 2,
        "hidden_size": 128,
        "out_hidden_size": HIDDEN,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 256,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 256,
    }


def qwen3_vl(ids: dict[str, int], vocab_size: int, options: ZooOptions) -> dict[str, Any]:
    """As qwen2_vl, for Qwen3-VL: interleaved multimodal rope, and DeepStack from the tower's first layer."""
    text = _qwen_text(ids, vocab_size)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 5000000.0}
    rope |= {"mrope_interleaved": True, "mrope_section": [12, 10, 10]}
    text |= {"model_type": "qwen3_vl_text", "head_dim": 64, "rope_parameters": rope}
    vision = _qwen3_vision("qwen3_vl_vision") | {"deepstack_visual_indexes": [0]}
    head = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
    return head | _qwen_ids(ids) | {"text_config": text, "vision_config": vision}


def seeing(ids: dict[str, int], vocab_size: int, options: ZooOptions) -> dict[str, Any]:
    """Qwen3-VL, half as wide as the others: it must learn from pictures in half an hour on one core."""
    config = qwen3_vl(ids, vocab_size, options)
    rope = {"rope_type": "default", "rope_theta": 5000000.0, "mrope_interleaved": True, "mrope_section": [6, 5, 5]}
    sizes = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "rope_parameters": rope}
    config["text_config"] |= sizes
    # 36 positions: one for each patch of the pictures it was trained on.
    config["vision_config"] |= {"depth": 3, "num_heads": 4, "out_hidden_size": 128, "num_position_embeddings": 36}
    return config


def qwen3_5(ids: dict[str, int], vocab_size: int, options: ZooOptions) -> dict[str, Any]:
    """As qwen2_vl, for Qwen3.5: three layers of linear attention (GDN) to one of full attention, in bfloat16."""
    text = _qwen_text(ids, vocab_size)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
    rope |= {"mrope_interleaved": True, "mrope_section": [4, 2, 2]}
    text |= {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "head_dim": 64,
        "rope_parameters": rope,
        "partial_rotary_factor": 0.25,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "mamba_ssm_dtype": "float32",
    }
    vision = _qwen3_vision("qwen3_5_vision")
    head = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    return head | _qwen_ids(ids) | {"text_config": text, "vision_config": vision}


def gemma3(ids: dict[str, int], vocab_size: int, options: ZooOptions) -> dict[str, Any]:
    """As qwen2_vl, for Gemma 3: three layers with a sliding window to one with full attention, and a SigLIP tower."""
    text = {
        "model_type": "gemma3_text",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": MAX_POSITION,
        "query_pre_attn_scalar": 64,
        "rms_norm_eps": 1e-6,
        "sliding_window": options.sliding_window,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
        "pad_token_id": ids["<pad>"],
        "eos_token_id": ids["<eos>"],
        "bos_token_id": ids["<bos>"],
        "tie_word_embeddings": True,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 224,
        "patch_size": 14,
        "num_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "vision_use_head": False,
    }
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "image_token_index": ids["<image_soft_token>"],
        "mm_tokens_per_image": options.mm_tokens_per_image,
        "eos_token_id": [ids["<eos>"], ids["<end_of_turn>"]],
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": vision,
    }


def qwen_processor(
    processor: str, video: str, patch_size: int, mean: list[float], std: list[float], min_pixels: int
) -> Callable[[ZooOptions], dict[str, dict[str, Any]]]:
    """The maker of a Qwen family's preprocessor files. Units: patch_size in pixels a side, min_pixels in all."""

    def files(options: ZooOptions) -> dict[str, dict[str, Any]]:
        both = {
            "patch_size": patch_size,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": mean,
            "image_std": std,
            "processor_class": processor,
        }
        size = {"shortest_edge": min(min_pixels, options.max_pixels), "longest_edge": options.max_pixels}
        image = both | {"image_processor_type": "Qwen2VLImageProcessorFast", "size": size}
        video_size = {"shortest_edge": min_pixels, "longest_edge": 4 * options.max_pixels}
        videos = both | {"video_processor_type": video, "size": video_size}
        return {"preprocessor_config.json": image, "video_preprocessor_config.json": videos}

    return files


def gemma_processor(options: ZooOptions) -> dict[str, dict[str, Any]]:
    """The processor's files, by their names: 224x224 pixels, no pan and scan."""
    image = {
        "image_processor_type": "Gemma3ImageProcessorFast",
        "processor_class": "Gemma3Processor",
        "image_mean": HALF,
        "image_std": HALF,
        "size": {"height": 224, "width": 224},
        "image_seq_length": options.mm_tokens_per_image,
        "do_pan_and_scan": None,
    }
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": options.mm_tokens_per_image}
    return {"preprocessor_config.json": image, "processor_config.json": processor}
