# SPDX-License-Identifier: Apache-2.0
"""Random weights for a zoo model, each tensor drawn from the seed and its own name.

The shapes come from the family's real Transformers module on the meta device, so nothing is allocated twice and
torch's global random state is not touched. numpy draws, since its streams are the same on every machine.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from mmcache_tools.zoo.family import Draw, Family


def _generator(seed: int, key: str) -> Any:
    import numpy as np

    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))


def centre_and_std(name: str, num_dims: int, draw: Draw) -> tuple[float, float]:
    """Mean and standard deviation of the parameter called `name` (a Transformers module path)."""
    leaf = name.rsplit(".", 1)[-1]
    vision = ".visual." in name or ".vision_tower." in name or ".multi_modal_projector." in name
    if leaf == "bias":
        return 0.0, 0.05
    if leaf == "dt_bias":
        return 1.0, 0.1
    if "norm" in name and num_dims == 1:
        if name.endswith("linear_attn.norm.weight") or (vision and "mm_soft_emb_norm" not in name):
            return 1.0, 0.1  # ordinary norms, in every family
        if "q_norm" in name or "k_norm" in name:
            return draw.qk_norm, 0.1
        if "post_attention_layernorm" in name or "post_feedforward_layernorm" in name:
            return draw.norm_centre + draw.post_norm, 0.1
        if name.endswith("language_model.norm.weight") and draw.final_norm is not None:
            return draw.final_norm, 0.1
        return draw.norm_centre, 0.1
    if "embed_tokens" in name:
        return 0.0, draw.embedding
    if name.startswith("lm_head"):
        return 0.0, draw.lm_head
    if "pos_embed" in name or "position_embedding" in name or "conv1d" in name:
        return 0.0, 0.5
    return 0.0, draw.matrix


def write_weights(family: Family, directory: Path, seed: int, mute: list[int]) -> int:
    """Write model.safetensors for the config.json that is already in `directory`.

    mute: token ids whose output row is zero, or, where input and output share one table, small.
    Returns the number of parameters.
    """
    import numpy as np
    import torch
    from safetensors.torch import save
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    tied = bool(config.tie_word_embeddings)
    tensors: dict[str, Any] = {}
    parameters: dict[str, Any] = dict(model.named_parameters())  # leaves out the tied lm_head
    kept = model.state_dict()  # leaves out what a checkpoint does not hold
    for name, buffer in model.named_buffers():
        if name in kept and buffer.is_floating_point():  # Gemma 4: a scale per layer
            parameters[name] = buffer
    for name, parameter in parameters.items():
        generator = _generator(seed, f"{family.name}:{name}")
        if name.endswith("A_log"):
            # Decay per token is exp(-exp(A_log) * softplus(..)): rates from 0.001 to 0.05 keep a picture in the
            # state for 20 to 1000 tokens. Transformers' own range, up to 16, forgets it before the question ends.
            values = generator.uniform(np.log(0.001), np.log(0.05), tuple(parameter.shape)).astype(np.float32)
        else:
            own = family.centre_and_std(name, parameter.dim()) if family.centre_and_std else None
            centre, std = own or centre_and_std(name, parameter.dim(), family.draw)
            values = generator.standard_normal(tuple(parameter.shape), dtype=np.float32)
            values = (centre + std * values).astype(np.float32)
        if name.startswith("lm_head"):
            values[mute] = 0.0
        elif tied and "embed_tokens" in name:
            # A row must stay usable as input: the norms bring it back to size, only its logit shrinks.
            values[mute] *= 0.2
        if name.endswith(family.transposed):  # never for an empty tuple
            values = values.swapaxes(-1, -2)
        key = name
        for prefix, published in family.rename:
            if key.startswith(prefix):
                key = published + key.removeprefix(prefix)
                break
        tensors[key] = torch.from_numpy(values).to(getattr(torch, family.dtype)).contiguous()
    # Through Path, so that a full disk is an OSError like everywhere else, and not safetensors' own error.
    content = save(dict(sorted(tensors.items())), metadata={"format": "pt"})
    (directory / "model.safetensors").write_bytes(content)
    return sum(t.numel() for t in tensors.values())


def copy_weights(source: Path, directory: Path) -> int:
    """Copy trained weights to model.safetensors; returns the number of parameters."""
    from safetensors.numpy import load

    content = source.read_bytes()
    num_parameters = sum(int(values.size) for values in load(content).values())
    (directory / "model.safetensors").write_bytes(content)
    return num_parameters
