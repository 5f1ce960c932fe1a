# SPDX-License-Identifier: Apache-2.0
"""PaliGemma: one picture before the text, and the whole prompt attends both ways.

vLLM marks the picture alone, so it is not served exactly anywhere; on the CPU mmcache refuses it
(models/facts.py). The model is here to prove both.
"""

from __future__ import annotations

from typing import Any

from mmcache_tools.zoo.configs import HALF, HIDDEN, MAX_POSITION, NUM_LAYERS, ZooOptions
from mmcache_tools.zoo.families import GEMMA_NEWLINES
from mmcache_tools.zoo.family import Draw, Family

SIDE, PATCH = 112, 14
NUM_TOKENS = (SIDE // PATCH) ** 2


def paligemma(ids: dict[str, int], vocab_size: int, options: ZooOptions) -> dict[str, Any]:
    """The config.json of a small PaliGemma: a Gemma with one KV head, and a SigLIP tower for 112x112 pixels."""
    text = {
        "model_type": "gemma",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "pad_token_id": ids["<pad>"],
        "eos_token_id": ids["<eos>"],
        "bos_token_id": ids["<bos>"],
        "num_image_tokens": NUM_TOKENS,
        "tie_word_embeddings": True,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        "num_channels": 3,
        "num_image_tokens": NUM_TOKENS,
        "projection_dim": HIDDEN,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "vision_use_head": False,
    }
    return {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "model_type": "paligemma",
        "image_token_index": ids["<image>"],
        "projection_dim": HIDDEN,
        "eos_token_id": ids["<eos>"],
        "pad_token_id": ids["<pad>"],
        "bos_token_id": ids["<bos>"],
        "tie_word_embeddings": True,
        "text_config": text,
        "vision_config": vision,
    }


def processor_files(options: ZooOptions) -> dict[str, dict[str, Any]]:
    """The processor's files, by their names: every picture becomes 112x112 pixels, 64 tokens."""
    image = {
        "image_processor_type": "SiglipImageProcessorFast",
        "processor_class": "PaliGemmaProcessor",
        "image_seq_length": NUM_TOKENS,
        "image_mean": HALF,
        "image_std": HALF,
        "size": {"height": SIDE, "width": SIDE},
        "resample": 3,
    }
    return {"preprocessor_config.json": image, "processor_config.json": {"processor_class": "PaliGemmaProcessor"}}


_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast", "processor_class": "PaliGemmaProcessor", "bos_token": "<bos>",
    "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "add_bos_token": False,
    "extra_special_tokens": {"image_token": "<image>"}, "image_token": "<image>",
}  # fmt: skip

PALIGEMMA = Family(
    "paligemma", ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<image>"), GEMMA_NEWLINES, _TOKENIZER,
    "paligemma.jinja", paligemma, processor_files,
    (
        ("model.vision_tower.", "vision_tower.vision_model."), ("model.language_model.", "language_model.model."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
    ),
    draw=Draw(embedding=0.06, norm_centre=0.0, final_norm=2.0), bos="<bos>", adds_bos=False, eos="<eos>",
    image_token="<image>",
)  # fmt: skip
