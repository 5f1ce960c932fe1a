# SPDX-License-Identifier: Apache-2.0
"""Attention over images in its naive form: read a sequence's whole K and V from the paged cache, then mask and attend.

The answer to the question how a token of an image can see keys that a step did not compute: all of them are in the
cache, so they are gathered from there. vllm_backend.py has vLLM's own kernel do the same; this form is what that one
and the kernels of GPUs are tested against. Worker process; torch alone.
"""

from dataclasses import dataclass

import torch


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
    start: int, end: int, spans: list[tuple[int, int]], sliding_window: int, device: torch.device | None = None
) -> torch.Tensor:
    """Which keys each row may see: (causal or of the same image span) and in the window.

    Rows are positions start to end (exclusive), keys positions 0 to end. sliding_window is in tokens, 0 or less is
    none; it bounds what lies before a row, as in Transformers. Returns: bool (end - start, end).
    """
    row = torch.arange(start, end, device=device)[:, None]
    key = torch.arange(end, device=device)[None, :]
    mask = key <= row
    for first, last in spans:
        mask |= (row >= first) & (row <= last) & (key >= first) & (key <= last)
    if sliding_window > 0:
        mask &= key > row - sliding_window
    return mask


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Masked attention of one sequence with grouped heads, computed in float32.

    Shapes: query (rows, num_heads, head_size), key and value (num_kv_heads, keys, head_size), mask bool (rows, keys);
    returns (rows, num_heads, head_size) in the query's dtype.
    """
    groups = query.shape[1] // key.shape[0]
    out = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1).float(),  # (heads, rows, dim)
        key.repeat_interleave(groups, 0).float(),
        value.repeat_interleave(groups, 0).float(),
        attn_mask=mask[None],
        scale=scale,
    )
    return out.transpose(0, 1).to(query.dtype)


@dataclass
class Rows:
    """A step: what it computes of each request, and its spans.

    query_start_loc: the first row of each request, and the end of all. starts, ends: positions [start, end) of each
    request's rows in its sequence. spans: by request, (first, last) positions, both inclusive.
    """

    query_start_loc: list[int]
    starts: list[int]
    ends: list[int]
    spans: dict[int, list[tuple[int, int]]]
    block_table: torch.Tensor  # (requests, max_blocks) int32
