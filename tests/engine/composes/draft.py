# SPDX-License-Identifier: Apache-2.0
"""A random text model as the draft model of a tiny one: one Llama layer, with the target's table of tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def write_draft(model: Path, directory: Path) -> None:
    """Write it, with the model's tokenizer; says the last token again, as a random target does now and then."""
    for path in model.glob("token*"):
        os.link(path, directory / path.name)
    config = json.loads((model / "config.json").read_text())
    text = config["text_config"]
    target = load_file(model / "model.safetensors")
    table = next(tensor for name, tensor in target.items() if "embed_tokens" in name)
    vocabulary, hidden = table.shape
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "self_attn.q_proj": (256, hidden), "self_attn.k_proj": (128, hidden), "self_attn.v_proj": (128, hidden),
        "self_attn.o_proj": (hidden, 256), "mlp.gate_proj": (256, hidden), "mlp.up_proj": (256, hidden),
        "mlp.down_proj": (hidden, 256),
    }  # fmt: skip
    tensors = {
        f"model.layers.0.{name}.weight": (torch.randn(shape, generator=generator) * 0.01).to(table.dtype)
        for name, shape in shapes.items()
    }
    ones = torch.ones(hidden, dtype=table.dtype)
    norms = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")
    tensors |= {f"{name}.weight": ones.clone() for name in norms}
    tensors["model.embed_tokens.weight"] = table.clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    about = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "vocab_size": vocabulary, "max_position_embeddings": text["max_position_embeddings"],
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": True,
        "dtype": config["dtype"],
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(about))
