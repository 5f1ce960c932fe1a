# SPDX-License-Identifier: Apache-2.0
"""The fast form on vLLM's real CPU kernel against the reference form, on paged keys and values of random steps.

Full attention and sliding windows, also much shorter than an image, several requests and images, steps that start
before, inside and after an image, decode rows, float32 and bfloat16, block sizes 32, 64 and 128.
"""

import random

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_mmcache.components.image_spans.attention_spans import cut_step, wider
from vllm_mmcache.components.image_spans.vllm_backend import rewrite
from vllm_mmcache.reference_attention import naive
from vllm_mmcache.reference_attention.vllm_layers import page_orders

pytestmark = pytest.mark.answers

HEADS, KV_HEADS = 4, 2
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
Spans = dict[int, list[tuple[int, int]]]


class Step:
    """Paged keys and values of several requests, and one step over them."""

    def __init__(self, seed: int, dtype: torch.dtype, block_size: int, head_size: int) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.isa = _get_attn_isa(dtype, block_size, head_size)
        self.dtype, self.block_size, self.head_size = dtype, block_size, head_size
        self.spans: Spans = {}
        self.starts, self.ends = [], []
        for i in range(rng.randint(1, 4)):
            position, spans = rng.randint(0, 40), []
            for _ in range(rng.randint(0, 3)):
                length = rng.randint(1, 60)
                spans.append((position, position + length - 1))
                position += length + rng.randint(0, 30)
            end = position + rng.randint(1, 20)
            # before, inside and after images; the last is a decode row
            self.starts.append(rng.choice([0, *(rng.randint(f, last) for f, last in spans), end - 1]))
            self.ends.append(end)
            self.spans[i] = spans
        blocks = [-(-end // block_size) for end in self.ends]
        ids = list(range(1, sum(blocks) + 1))
        rng.shuffle(ids)
        self.table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
        shape = (sum(blocks) + 1, KV_HEADS, block_size, head_size)
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self.true_keys, self.true_values = [], []
        for i, count in enumerate(blocks):
            mine = [ids.pop() for _ in range(count)]
            self.table[i, :count] = torch.tensor(mine)
            key = torch.randn(self.ends[i], KV_HEADS, head_size).to(dtype)
            value = torch.randn(self.ends[i], KV_HEADS, head_size).to(dtype)
            slots = torch.tensor([mine[p // block_size] * block_size + p % block_size for p in range(self.ends[i])])
            ops.cpu_attn_reshape_and_cache(key, value, self.keys, self.values, slots, self.isa)
            self.true_keys.append(key.transpose(0, 1))
            self.true_values.append(value.transpose(0, 1))
        counts = [end - start for start, end in zip(self.starts, self.ends, strict=True)]
        self.rows = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).to(torch.int32)
        self.query = torch.randn(sum(counts), HEADS, head_size).to(dtype)

    def metadata(self) -> CommonAttentionMetadata:
        """The step as vLLM describes it."""
        lengths = torch.tensor(self.ends, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=self.rows,
            query_start_loc_cpu=self.rows,
            seq_lens=lengths,
            num_reqs=len(self.ends),
            num_actual_tokens=len(self.query),
            max_query_len=int(self.rows.diff().max()),
            max_seq_len=max(self.ends),
            block_table_tensor=self.table,
            slot_mapping=torch.zeros(len(self.query), dtype=torch.int64),
            causal=True,
            mm_req_doc_ranges=self.spans,
        )

    def fast(self, window: int, spans: Spans, again: bool = True) -> torch.Tensor:
        """The optimised kernel over the rewritten step, and again over rows whose image ends outside the window."""
        step = self.metadata()
        pieces = cut_step(self.starts, self.ends, spans)
        out = self.kernel(rewrite(step, pieces) if pieces else step, self.query, window)
        if again and pieces and window > 0:
            for wide, parts in wider(pieces, window).items():
                rows = torch.cat([torch.arange(row, row + piece.num_rows) for row, piece in parts])
                out[rows] = self.kernel(rewrite(step, [piece for _, piece in parts]), self.query[rows], wide)
        return out

    def kernel(self, step: CommonAttentionMetadata, query: torch.Tensor, window: int) -> torch.Tensor:
        """vLLM's kernel, as its backend calls it. Shapes: query (rows, HEADS, head_size)."""
        dynamic = step.causal if isinstance(step.causal, torch.Tensor) else None
        causal = dynamic is None
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=step.num_reqs,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=self.head_size,
            seq_lens=step.seq_lens,
            dtype=self.dtype,
            query_start_loc=step.query_start_loc,
            causal=causal,
            sliding_window_size=window,
            isa=self.isa,
            enable_kv_split=True,
            dynamic_causal=dynamic,
        )
        out = torch.zeros_like(query)
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=self.keys,
            value_cache=self.values,
            output=out,
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            scale=self.head_size**-0.5,
            causal=causal,
            alibi_slopes=None,
            sliding_window=window,
            block_table=step.block_table_tensor,
            softcap=0,
            scheduler_metadata=plan,
            s_aux=None,
            dynamic_causal=dynamic,
        )
        return out

    def naive(self, window: int) -> torch.Tensor:
        """The reference form: everything gathered back from the pages."""
        orders = page_orders(self.isa, self.dtype, self.block_size, self.head_size)
        out = []
        for i, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            pages = (self.keys, self.values)
            key, value = (naive.gather_pages(p, self.table[i], end, o) for p, o in zip(pages, orders, strict=True))
            assert torch.equal(key, self.true_keys[i])
            assert torch.equal(value, self.true_values[i])
            mask = naive.allowed(start, end, self.spans[i], window)
            rows = self.query[self.rows[i] : self.rows[i + 1]]
            out.append(naive.attend(rows, key, value, mask, self.head_size**-0.5))
        return torch.cat(out)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("window", [-1, 5, 16, 64, 128])
def test_fast_form_equals_reference_form(window: int, dtype: torch.dtype, block_size: int) -> None:
    """Spans have up to 60 tokens, so they are up to twelve times as long as the shortest window."""
    for seed in range(12):
        step = Step(seed, dtype, block_size, 64)
        delta = (step.fast(window, step.spans).float() - step.naive(window).float()).abs().max()
        assert delta <= TOLERANCE[dtype], (seed, float(delta))


def test_causal_images_are_seen() -> None:
    """Negative control: with the rewriting left out, the kernel is far from the reference."""
    deltas = [
        float((step.fast(-1, {}) - step.naive(-1)).abs().max())
        for step in (Step(seed, torch.float32, 32, 64) for seed in range(6))
    ]
    assert max(deltas) > 0.1


def test_without_computing_again_a_longer_image_is_not_seen() -> None:
    """Negative control: one pass with a window of 16 is far from the reference."""
    steps = [Step(seed, torch.float32, 32, 64) for seed in range(6)]
    assert max(float((step.fast(16, step.spans, again=False) - step.naive(16)).abs().max()) for step in steps) > 0.1


@pytest.mark.parametrize("head_size", [32, 80, 128])
def test_head_sizes(head_size: int) -> None:
    step = Step(3, torch.float32, 32, head_size)
    assert float((step.fast(-1, step.spans) - step.naive(-1)).abs().max()) <= 1e-4
