# SPDX-License-Identifier: Apache-2.0
"""The naive form: gather a sequence's whole K and V from its pages, then masked scaled-dot-product attention.

This is what the optimised kernel is tested against, and the answer to the question how attention over images can see
more than the current step's keys: it reads all of them back from the paged cache. `put_in_place` has an engine of this
process compute so.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops

from vllm_mmcache.components.image_spans import vllm_backend


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


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, steps that are cut at their images are computed in this form, and no wider window again."""
    build, forward = vllm_backend.ImageSpanMetadataBuilder.build, vllm_backend.ImageSpanImpl.forward

    def build_rows(self: Any, common_prefix_len: int, step: Any, fast_build: bool = False) -> Any:
        metadata = build(self, common_prefix_len, step, fast_build)
        if isinstance(metadata, vllm_backend.ImageSpanMetadata):
            ends, rows = step.seq_lens.tolist(), step.query_start_loc.tolist()
            starts = [end - (rows[i + 1] - rows[i]) for i, end in enumerate(ends)]
            metadata.__dict__["rows"] = Rows(rows, starts, ends, step.mm_req_doc_ranges, step.block_table_tensor)
        return metadata

    def compute(
        self: Any,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        **scales: Any,
    ) -> Any:
        rows = getattr(attn_metadata, "rows", None)
        if rows is None or layer.layer_name in attn_metadata.causal_layers:
            return forward(self, layer, query, key, value, kv_cache, attn_metadata, output, **scales)
        compute_rows(self, layer, query, kv_cache, rows, output)
        return output

    monkeypatch.setattr(vllm_backend.ImageSpanMetadataBuilder, "build", build_rows)
    monkeypatch.setattr(vllm_backend.ImageSpanImpl, "forward", compute)


def compute_rows(
    impl: Any, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, step: Rows, output: torch.Tensor
) -> None:
    blocks, kv_heads, block_size, _ = kv_cache.shape
    keys, values = kv_cache.view(blocks, kv_heads, block_size * 2, -1).chunk(2, dim=2)
    key_order, value_order = page_orders(layer.isa, keys.dtype, block_size, keys.shape[3])
    for i, (start, end) in enumerate(zip(step.starts, step.ends, strict=True)):
        if end <= start:
            continue
        table = step.block_table[i]
        mask = allowed(start, end, step.spans.get(i, []), impl.sliding_window, query.device)
        rows = slice(step.query_start_loc[i], step.query_start_loc[i + 1])
        output[rows] = attend(
            query[rows],
            gather_pages(keys, table, end, key_order),
            gather_pages(values, table, end, value_order),
            mask,
            impl.scale,
        ).view_as(output[rows])


@cache
def page_orders(isa: str, dtype: torch.dtype, block_size: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the kernel of an instruction set keeps each element of a page, for keys and for values.

    Found by writing numbered pages with vLLM's own kernel, so no packing is assumed. The numbers go in three digits
    to base 128, which every dtype holds exactly. Returns two int64 (block_size * head_size,) on the CPU.
    """
    count = block_size * head_size
    numbers = torch.arange(count)
    slots = torch.arange(block_size)
    found = [torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)]
    for place in (1, 128, 128 * 128):
        digit = ((numbers // place) % 128).to(dtype).view(block_size, 1, head_size)
        pages = [torch.zeros(1, 1, block_size, head_size, dtype=dtype) for _ in found]
        ops.cpu_attn_reshape_and_cache(digit, digit, *pages, slots, isa)
        for where, page in zip(found, pages, strict=True):
            where += page.flatten().long() * place
    return found[0].argsort(), found[1].argsort()
