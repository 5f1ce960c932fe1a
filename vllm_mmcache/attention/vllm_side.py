# SPDX-License-Identifier: Apache-2.0
"""The CPU attention backend that honours image spans. Worker process; overrides CPU_ATTN through `register_backend`.

Fast form: once per step and KV cache group, the builder hands vLLM's own builder the step cut into pseudo-sequences
(spans.py); the optimised kernel does the rest. Reference form (setting attention_reference): gathers everything and
computes with a mask (reference.py). A step without image rows is left exactly as it is.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from vllm_mmcache import settings
from vllm_mmcache.attention import reference
from vllm_mmcache.attention.spans import Piece, cut_step


class ImageSpanMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds CPU attention metadata from pseudo-sequences where the step has image rows."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """See CPUAttentionMetadataBuilder.build; `mm_req_doc_ranges` are the step's image spans."""
        spans = common_attn_metadata.mm_req_doc_ranges
        off = settings.current().image_spans is False
        if off or not spans or self.is_encoder_only_attention or self.is_cross_attention:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        ends = common_attn_metadata.seq_lens.tolist()
        rows = common_attn_metadata.query_start_loc.tolist()
        starts = [end - (rows[i + 1] - rows[i]) for i, end in enumerate(ends)]
        if settings.current().attention_reference:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            metadata.mmcache_rows = (rows, starts, ends, spans)
            return metadata
        pieces = cut_step(starts, ends, spans)
        if pieces is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        return super().build(common_prefix_len, rewrite(common_attn_metadata, pieces), fast_build)


def rewrite(step: CommonAttentionMetadata, pieces: list[Piece]) -> CommonAttentionMetadata:
    """The step as if each piece were a request of its own; slots, and so what is written where, stay as they are."""
    device = step.query_start_loc.device
    num_rows = torch.tensor([0, *(piece.num_rows for piece in pieces)], dtype=torch.int64)
    query_start_loc = num_rows.cumsum(0).to(step.query_start_loc.dtype)
    seq_lens = torch.tensor([piece.seq_len for piece in pieces], dtype=step.seq_lens.dtype, device=device)
    owners = torch.tensor([piece.request for piece in pieces], dtype=torch.int64, device=device)
    return replace(
        step,
        num_reqs=len(pieces),
        query_start_loc=query_start_loc.to(device),
        query_start_loc_cpu=query_start_loc,
        seq_lens=seq_lens,
        max_query_len=max(piece.num_rows for piece in pieces),
        block_table_tensor=step.block_table_tensor[owners].contiguous(),
        # The kernel takes one int32 per sequence: 1 causal, 0 not.
        causal=torch.tensor([piece.causal for piece in pieces], dtype=torch.int32, device=device),
    )


class ImageSpanImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention, and the reference form where a step asks for it."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Shapes: query (tokens, heads, head_size), kv_cache (blocks, kv_heads, block_size, 2 * head_size)."""
        todo = getattr(attn_metadata, "mmcache_rows", None)
        if attn_metadata is None or todo is None or self.logits_soft_cap or self.alibi_slopes is not None or self.sinks:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        blocks, kv_heads, block_size, _ = kv_cache.shape
        keys, values = kv_cache.view(blocks, kv_heads, block_size * 2, -1).chunk(2, dim=2)
        rows, starts, ends, spans = todo
        key_order, value_order = page_orders(layer.isa, keys.dtype, block_size, keys.shape[3])
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if end <= start:
                continue
            table = attn_metadata.block_table[i]
            mask = reference.allowed(start, end, spans.get(i, []), self.sliding_window, query.device)
            output[rows[i] : rows[i + 1]] = reference.attend(
                query[rows[i] : rows[i + 1]],
                reference.gather_pages(keys, table, end, key_order),
                reference.gather_pages(values, table, end, value_order),
                mask,
                self.scale,
            ).view_as(output[rows[i] : rows[i + 1]])
        return output


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


class ImageSpanBackend(CPUAttentionBackend):
    """CPU_ATTN with image spans."""

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Image spans attend both ways."""
        return True

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """The implementation class."""
        return ImageSpanImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """The metadata builder class."""
        return ImageSpanMetadataBuilder
