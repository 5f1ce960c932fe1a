# SPDX-License-Identifier: Apache-2.0
"""What a family of the zoo is: its special tokens, configuration and processor, and how its weights are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mmcache_tools.zoo.configs import ZooOptions


@dataclass(frozen=True)
class Draw:
    """Standard deviations of the random weights, tuned so that pictures move the output (tests/lab/zoo checks it)."""

    embedding: float = 1.0
    matrix: float = 0.08
    lm_head: float = 0.25
    qk_norm: float = 1.5  # scale of the query and key norms: sharper attention than 1.0, so single patches count
    norm_centre: float = 1.0  # 0.0 where the family's RMSNorm multiplies by (1 + weight)
    post_norm: float = 0.0  # Gemma: weight of the norms after attention and MLP, which sets the size of updates
    final_norm: float | None = None


@dataclass(frozen=True)
class Family:
    """One family: its special tokens, the makers of its JSON files, and how its checkpoint is named and drawn."""

    name: str
    specials: tuple[str, ...]
    plain_added: tuple[str, ...]  # added tokens that are not special: they stay in decoded text
    tokenizer: dict[str, Any]  # tokenizer_config.json, without the chat template
    template: str  # file name under zoo/templates
    config: Callable[[dict[str, int], int, ZooOptions], dict[str, Any]]
    processor_files: Callable[[ZooOptions], dict[str, dict[str, Any]]]
    rename: tuple[tuple[str, str], ...]  # prefixes: Transformers module -> key in published checkpoints
    transposed: tuple[str, ...] = ()  # endings: published with the last two dimensions the other way round
    draw: Draw = field(default_factory=Draw)
    dtype: str = "float32"
    bos: str | None = None
    adds_bos: bool = True  # the tokenizer adds it; False where the template alone writes it
    eos: str = "<|im_end|>"
    trained: str | None = None  # folder under zoo/ with the tokenizer and weights; None: both are made from the seed
    image_token: str = "<|image_pad|>"  # what an image's embeddings stand for in the expanded prompt
    image_inside: tuple[str, ...] = ()  # texts between the embeddings of one image: ends of rows, borders of tiles
    takes_video: bool = False
    keeps_all_kv: bool = True  # full attention in every layer: each complete block stays a hit
    engine_arguments: tuple[tuple[str, Any], ...] = ()  # what vLLM must be told to be right with this family on the CPU
    centre_and_std: Callable[[str, int], tuple[float, float] | None] | None = (
        None  # asked before mmcache_tools/zoo/weights.py's own
    )
