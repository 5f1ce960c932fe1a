# SPDX-License-Identifier: Apache-2.0
"""Has an engine of this process compute attention over images in its naive form (reference_attention.py).

Worker process, on a CPU. For tests: the optimised kernel must give the same answers.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from vllm import _custom_ops as ops

from vllm_mmcache.components.image_spans import vllm_backend
from vllm_mmcache.components.image_spans.reference_attention import Rows, allowed, attend, gather_pages

_ROWS = "rows"  # on the metadata of a step


def put_in_place(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on, steps that are cut at their images are computed in this form, and no wider window again.

    replace: sets an attribute of a class of vllm_backend.py; pytest's monkeypatch.setattr takes it back afterwards.
    """
    build, forward = vllm_backend.ImageSpanMetadataBuilder.build, vllm_backend.ImageSpanImpl.forward

    def build_rows(self: Any, common_prefix_len: int, step: Any, fast_build: bool = False) -> Any:
        metadata = build(self, common_prefix_len, step, fast_build)
        if isinstance(metadata, vllm_backend.ImageSpanMetadata):
            ends, rows = step.seq_lens.tolist(), step.query_start_loc.tolist()
            starts = [end - (rows[i + 1] - rows[i]) for i, end in enumerate(ends)]
            computed = Rows(rows, starts, ends, step.mm_req_doc_ranges, step.block_table_tensor)
            setattr(metadata, _ROWS, computed)
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
        rows = getattr(attn_metadata, _ROWS, None)
        if rows is None or layer.layer_name in attn_metadata.causal_layers:
            return forward(self, layer, query, key, value, kv_cache, attn_metadata, output, **scales)
        compute_rows(self, layer, query, kv_cache, rows, output)
        return output

    replace(vllm_backend.ImageSpanMetadataBuilder, "build", build_rows)
    replace(vllm_backend.ImageSpanImpl, "forward", compute)


def compute_rows(
    impl: Any, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, step: Rows, output: torch.Tensor
) -> None:
    """Attention of a step's rows, written into `output`.

    Shapes: query and output (rows, num_heads, head_size); kv_cache as vLLM's CPU backend keeps it, keys and values of a
    block beside each other (num_blocks, num_kv_heads, block_size, 2 * head_size).
    """
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
