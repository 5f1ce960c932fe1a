# SPDX-License-Identifier: Apache-2.0
"""Tiny drafters for the zoo's models: what `speculative_config` gets, and the directories that it needs.

- `ngram`: looks for the last tokens earlier in the text; needs nothing.
- `mtp`: the model's own head, as Qwen3.5 publishes it; its layer is a copy of the full attention layer.
- `eagle`, `eagle3`: one random Llama layer in a directory of its own.
- `draft_model`: a model of one random Llama layer (../composes/draft.py).

A random model can't be foreseen, so its answers are drawn from `LETTERS` alone, and every drafter but ngram says the
last token again, with a little of its own layer added: some drafts are accepted and some are not, and both are tested.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engine.composes.draft import write_draft

NUM_TOKENS = 2  # drafted in a step
LETTERS = (" red", " cat", " dog")  # the tokens of which answers are made
_LITTLE = 0.01  # of what the drafter's own layer would add
_LAST_LAYER = "model.language_model.layers.3."  # of Qwen3.5: the one with full attention


def speculative_config(drafter: str, model: Path, scratch: Path) -> tuple[Path, dict[str, Any]]:
    """The directory to serve, `model` or one made below `scratch`, and vLLM's speculative_config."""
    common: dict[str, Any] = {"method": drafter, "num_speculative_tokens": NUM_TOKENS}
    if drafter == "ngram":
        return model, common | {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    directory = scratch / f"{model.name}-{drafter}"
    if not directory.exists():
        directory.mkdir(parents=True)
        writers = {"mtp": write_mtp, "eagle": write_eagle, "eagle3": write_eagle3, "draft_model": write_draft}
        writers[drafter](model, directory)
    if drafter == "mtp":
        return directory, common
    return model, common | {"model": str(directory)}


def write_mtp(model: Path, directory: Path) -> None:
    """Copy a model and, where it is a Qwen3.5, add the head that published checkpoints have."""
    config, tensors = _read(model)
    for path in model.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            os.link(path, directory / path.name)
    config["text_config"]["mtp_num_hidden_layers"] = 1
    for name in [name for name in tensors if name.startswith(_LAST_LAYER)]:
        writes = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
        tensors[name.replace(_LAST_LAYER, "mtp.layers.0.")] = tensors[name] * (_LITTLE if writes else 1.0)
    tensors["mtp.fc.weight"] = _says_it_again(tensors)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):  # they multiply by one and the weight
        tensors[f"mtp.{norm}.weight"] = torch.zeros(config["text_config"]["hidden_size"])
    _write(directory, config, tensors, config["dtype"])


def write_eagle(model: Path, directory: Path) -> None:
    """Write an EAGLE head, which uses the model's tables of input and output."""
    config, target = _read(model)
    llama = _llama(config, "LlamaForCausalLM")
    hidden = llama["hidden_size"]
    tensors = _layer("layers.0.", llama, seen=hidden) | {"fc.weight": _says_it_again(target)}
    _write(directory, llama, tensors, config["dtype"])


def write_eagle3(model: Path, directory: Path) -> None:
    """Write an EAGLE-3 head, which sees three layers of the model and has a vocabulary of its own: LETTERS."""
    from tokenizers import Tokenizer

    config, target = _read(model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    letters = torch.tensor([tokenizer.token_to_id(letter.replace(" ", "\u0120")) for letter in LETTERS])
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}  # the last one: what the model says
    llama = _llama(config, "LlamaForCausalLMEagle3")
    llama |= {"draft_vocab_size": len(letters), "eagle_config": layers | {"use_aux_hidden_state": True}}
    hidden = llama["hidden_size"]
    tensors = _layer("midlayer.", llama, seen=2 * hidden) | {
        "fc.weight": torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], dim=1),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": _output_table(target)[letters],
        "d2t": letters - torch.arange(len(letters)),
    }
    _write(directory, llama, tensors, config["dtype"])


def _read(model: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The configuration and the tensors of a model, these in float32."""
    tensors = load_file(model / "model.safetensors")
    return json.loads((model / "config.json").read_text()), {name: tensor.float() for name, tensor in tensors.items()}


def _write(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], dtype: str) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    kept = {n: (t.to(getattr(torch, dtype)) if t.is_floating_point() else t).contiguous() for n, t in tensors.items()}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


def _input_table(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return next(tensor for name, tensor in tensors.items() if "embed_tokens" in name)


def _output_table(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return next((tensor for name, tensor in tensors.items() if "lm_head" in name), _input_table(tensors))


def _says_it_again(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """fc of a head: from (embedding of a token, hidden state) to what makes that token the likeliest.

    Shapes: (hidden, 2 * hidden). The embedding's half is the least squares solution of `output @ half @ input.T = 1`.
    """
    into, out = _input_table(tensors).double(), _output_table(tensors).double()
    half = torch.linalg.pinv(out) @ torch.linalg.pinv(into).T
    half = half / half.std() * 0.08
    return torch.cat([half, torch.zeros_like(half)], dim=1).float()


def _llama(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    text = config["text_config"]
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": text["hidden_size"],
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": text["vocab_size"],
        "max_position_embeddings": text["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": config["dtype"],
    }


def _layer(prefix: str, llama: dict[str, Any], seen: int) -> dict[str, torch.Tensor]:
    """A random Llama layer whose attention sees `seen` numbers, without its first norms."""
    generator = torch.Generator().manual_seed(0)
    hidden, inner, width = llama["hidden_size"], llama["intermediate_size"], llama["head_dim"]
    queries, keys = llama["num_attention_heads"] * width, llama["num_key_value_heads"] * width
    shapes = {
        "self_attn.q_proj": (queries, seen), "self_attn.k_proj": (keys, seen), "self_attn.v_proj": (keys, seen),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    tensors = {}
    for name, shape in shapes.items():
        std = 0.08 * (_LITTLE if name.endswith(("o_proj", "down_proj")) else 1.0)
        tensors[f"{prefix}{name}.weight"] = torch.randn(shape, generator=generator) * std
    return tensors | {f"{prefix}post_attention_layernorm.weight": torch.ones(hidden)}
