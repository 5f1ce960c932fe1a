# SPDX-License-Identifier: Apache-2.0
"""Positions of prompts whose images came without their pixels: a model's own code gets fields that a store kept.

What it makes of fields that are not of the image may be an error or positions outside its tables, and either would end
the engine. Such a prompt has the positions of text. Worker process.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vllm_mmcache.components.lazy_processing.vllm_item import is_deferred

logger = logging.getLogger("vllm.mmcache")

_ASKED = ("get_mrope_input_positions", "get_xdrope_input_positions")
_TABLE = 4  # times the longest prompt: the positions that vLLM's MRotaryEmbedding has


def guard_positions(model: Any, model_config: Any) -> None:
    """From now on this model's own positions of deferred images are looked at before they are used."""
    longest = getattr(model_config.hf_text_config, "max_position_embeddings", None) or 0
    most = _TABLE * max(int(longest), int(model_config.max_model_len))
    for name in _ASKED:
        stock = getattr(model, name, None)
        if callable(stock):
            setattr(model, name, partial(_positions, stock, most))


def _positions(stock: Callable[..., Any], most: int, input_tokens: list[int], mm_features: Any) -> Any:
    if not any(is_deferred(feature.data) for feature in mm_features):
        return stock(input_tokens, mm_features)
    try:
        found = stock(input_tokens, mm_features)
        if _fits(found, len(input_tokens), most):
            return found
        said = "they do not fit the prompt"
    except Exception as error:  # of a model's own code
        said = f"{type(error).__name__}: {error}"
    logger.error("mmcache: an image has no positions, since its record is not its own; it is read as text: %s", said)
    return stock(input_tokens, [])


def _fits(found: Any, num_tokens: int, most: int) -> bool:
    positions = found[0] if isinstance(found, tuple) else found
    if not isinstance(positions, torch.Tensor) or positions.shape[-1] != num_tokens:
        return False
    return bool(not positions.numel() or (positions.min() >= 0 and positions.max() < most))
