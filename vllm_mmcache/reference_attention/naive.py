# SPDX-License-Identifier: Apache-2.0
"""Attention in its naive form: read a sequence's whole K and V from the paged cache, then mask and attend.

The answer to the question how a token can see keys that a step did not compute: all of them are in the cache, so they
are gathered from there, while decoding as in a prefill. This form is what kernels are tested against, on the CPU and on
GPUs. Worker process; torch alone.
"""

from collections.abc import Sequence

import torch

Span = tuple[int, int]
"""First and last position of the tokens of an image, both inclusive."""


def gather_pages(
    pages: torch.Tensor, block_table: torch.Tensor, seq_len: int, order: torch.Tensor | None = None
) -> torch.Tensor:
    """The first seq_len tokens of a sequence out of its pages.

    Shapes: pages (num_blocks, num_kv_heads, block_size, head_size), block_table (max_blocks,) int32; order int64
    (block_size * head_size,) says where in a page each element lies, where the kernel packs its pages.
    Returns (num_kv_heads, seq_len, head_size).
    """
    _, kv_heads, block_size, head_size = pages.shape
    blocks = pages[block_table[: (seq_len + block_size - 1) // block_size].long()]  # (blocks, kv_heads, size, dim)
    if order is not None:
        blocks = blocks.flatten(2)[..., order].view(-1, kv_heads, block_size, head_size)
    return blocks.permute(1, 0, 2, 3).reshape(kv_heads, -1, head_size)[:, :seq_len]


def allowed(
    start: int, end: int, spans: Sequence[Span], sliding_window: int, device: torch.device | None = None
) -> torch.Tensor:
    """Which keys each row may see: (causal or of the same image span) and in the window.

    Rows are positions start to end (exclusive), keys positions 0 to end. sliding_window is in tokens, 0 or less is
    none; it bounds what lies before a row, as in Transformers. Returns: bool (end - start, end).
    """
    return allowed_at(torch.arange(start, end, device=device), end, spans, sliding_window)


def allowed_at(positions: torch.Tensor, num_keys: int, spans: Sequence[Span], sliding_window: int) -> torch.Tensor:
    """As `allowed`, of rows at these positions, int64 (rows,). Returns: bool (rows, num_keys)."""
    row = positions[:, None]
    key = torch.arange(num_keys, device=positions.device)[None, :]
    mask = key <= row
    for first, last in spans:
        mask |= (row >= first) & (row <= last) & (key >= first) & (key <= last)
    if sliding_window > 0:
        mask &= key > row - sliding_window
    return mask


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    soft_cap: float = 0,
) -> torch.Tensor:
    """Masked attention of one sequence with grouped heads, computed in float32.

    Shapes: query (rows, num_heads, head_size), key and value (num_kv_heads, keys, head_size), mask bool (rows, keys);
    returns (rows, num_heads, head_size) in the query's dtype. soft_cap bounds the scores by its tanh; 0 is none.
    """
    groups = query.shape[1] // key.shape[0]
    keys = key.repeat_interleave(groups, 0).float()  # (heads, keys, dim)
    scores = query.transpose(0, 1).float() @ keys.transpose(1, 2) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = scores.masked_fill(~mask[None], float("-inf")).softmax(-1)
    out = weights @ value.repeat_interleave(groups, 0).float()
    return out.transpose(0, 1).to(query.dtype)
