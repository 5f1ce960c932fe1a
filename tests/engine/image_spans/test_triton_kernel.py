# SPDX-License-Identifier: Apache-2.0
"""vLLM's Triton attention over images, in Triton's interpreter, against the reference, on pages of random steps.

On CUDA this kernel computes images that attend both ways. vLLM's own code writes the pages, makes a tensor of the
spans and calls the kernel. Pages are shuffled and hold NaN where nothing was written. A batch has several requests with
prefix hits that end before, inside and after images, adjacent images and decode rows; heads are grouped by 1 to 8.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from tests.engine.image_spans.triton_backend import granted
from tests.support.sizes import scaled
from vllm_mmcache.reference_attention import naive, vllm_layers

pytestmark = pytest.mark.interpreter

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
SEEDS = {torch.float32: range(scaled(4)), torch.bfloat16: range(scaled(2))}
SEGMENTS = 16  # of a decode row's keys, as vLLM's metadata builder has them
Span = tuple[int, int]


@dataclass(frozen=True)
class Rule:
    """One kind of layer. Units: tokens; window 0 is none. clamps: images stay within the window, as in Gemma 4."""

    window: int
    clamps: bool
    longest: int  # image of the steps


GEMMA3_FULL = Rule(0, False, 40)
GEMMA3_SLIDING = Rule(40, False, 40)  # vLLM's kernel lets an image override the window; none is longer than it
GEMMA4_SLIDING = Rule(16, True, 40)
GEMMA4_NARROW = Rule(5, True, 60)
RULES = {
    "gemma3-full": GEMMA3_FULL,
    "gemma3-sliding": GEMMA3_SLIDING,
    "gemma4-sliding": GEMMA4_SLIDING,
    "gemma4-narrow": GEMMA4_NARROW,
}


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with granted():
        yield


class Step:
    """Paged keys and values of several requests, and one step over them."""

    def __init__(self, seed: int, dtype: torch.dtype, longest: int, only_last: bool = False) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.kv_heads, groups = rng.choice([(1, 8), (2, 2), (2, 1), (1, 4), (2, 3)])
        self.heads, self.head_size = self.kv_heads * groups, rng.choice([64, 128])
        self.block_size = rng.choice([16, 32, 64])
        self.spans: list[list[Span]] = []
        self.starts, self.ends = [], []
        for _ in range(rng.randint(1, 3)):
            position, spans = rng.randint(0, 20), []
            for _ in range(rng.randint(0, 3)):
                length = rng.randint(1, longest)
                spans.append((position, position + length - 1))
                position += length + rng.choice([0, 0, rng.randint(1, 20)])
            end = position + rng.randint(0, 20) + (not spans)
            starts = [0, *(rng.randint(first, last) for first, last in spans), end - 1]
            self.starts.append(end - 1 if only_last else rng.choice(starts))
            self.ends.append(end)
            self.spans.append(spans)
        counts = [end - start for start, end in zip(self.starts, self.ends, strict=True)]
        self.rows = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        self.query = torch.randn(sum(counts), self.heads, self.head_size).to(dtype)
        shapes = [(end, self.kv_heads, self.head_size) for end in self.ends]
        self.keys = [torch.randn(shape).to(dtype) for shape in shapes]
        self.values = [torch.randn(shape).to(dtype) for shape in shapes]
        blocks = [-(-end // self.block_size) for end in self.ends]
        ids = list(range(1, sum(blocks) + 1))
        rng.shuffle(ids)
        self.table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
        for i, count in enumerate(blocks):
            self.table[i, :count] = torch.tensor([ids.pop() for _ in range(count)])
        self.slots = [
            self.table[i, torch.arange(end) // self.block_size].long() * self.block_size
            + torch.arange(end) % self.block_size
            for i, end in enumerate(self.ends)
        ]
        shape = (sum(blocks) + 1, self.kv_heads, self.block_size, 2 * self.head_size)
        self.pages = torch.full(shape, float("nan"), dtype=dtype)

    def triton(self, rule: Rule, use_spans: bool = True) -> torch.Tensor:
        """vLLM's backend: keys and values written into pages, then all of them read back from there."""
        from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl, TritonAttentionMetadata
        from vllm.v1.attention.backends.utils import compute_mm_prefix_range_tensor

        impl = TritonAttentionImpl(
            num_heads=self.heads,
            head_size=self.head_size,
            scale=self.head_size**-0.5,
            num_kv_heads=self.kv_heads,
            alibi_slopes=None,
            sliding_window=rule.window or None,
            kv_cache_dtype="auto",
        )
        layer = torch.nn.Module()
        layer._q_scale = layer._k_scale = layer._v_scale = torch.ones(())
        layer.mm_prefix_clamp_sliding_window = rule.clamps
        key, value, slots = torch.cat(self.keys), torch.cat(self.values), torch.cat(self.slots)
        impl.do_kv_cache_update(layer, key, value, self.pages, slots)
        scratch = torch.empty(len(self.query), self.heads, SEGMENTS, self.head_size)
        spans = dict(enumerate(self.spans)) if use_spans else None
        metadata = TritonAttentionMetadata(
            num_actual_tokens=len(self.query),
            max_query_len=int(self.rows.diff().max()),
            query_start_loc=self.rows,
            max_seq_len=max(self.ends),
            seq_lens=torch.tensor(self.ends, dtype=torch.int32),
            block_table=self.table,
            slot_mapping=slots,
            seq_threshold_3D=64,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=scratch,
            softmax_segm_max=torch.empty(scratch.shape[:3]),
            softmax_segm_expsum=torch.empty(scratch.shape[:3]),
            causal=True,
            mm_prefix_range=spans,
            mm_prefix_range_tensor=compute_mm_prefix_range_tensor(spans, len(self.ends), torch.device("cpu")),
        )
        out = torch.zeros_like(self.query)
        return impl.forward(layer, self.query, key, value, self.pages, metadata, out)

    def naive(self, window: int) -> torch.Tensor:
        """The reference, over keys and values that were never in pages."""
        out = []
        for i, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            mask = naive.allowed(start, end, self.spans[i], window)
            rows = self.query[self.rows[i] : self.rows[i + 1]]
            key, value = self.keys[i].transpose(0, 1), self.values[i].transpose(0, 1)
            out.append(naive.attend(rows, key, value, mask, self.head_size**-0.5))
        return torch.cat(out)

    def read_back(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a request as the naive form reads them from the pages. (tokens, kv_heads, head_size)."""
        layer = SimpleNamespace(head_size=self.head_size)
        keys, values, *_ = vllm_layers._pages(layer, self.pages)
        key, value = (naive.gather_pages(pages, self.table[i], self.ends[i]) for pages in (keys, values))
        return key.transpose(0, 1), value.transpose(0, 1)

    def distance(self, rule: Rule, of: Rule | None = None, use_spans: bool = True) -> float:
        """The largest difference between vLLM's kernel under `rule` and the reference under `of`; NaN fails."""
        found = self.triton(rule, use_spans=use_spans)
        assert not found.isnan().any()
        return float((found.float() - self.naive((of or rule).window).float()).abs().max())


def test_steps_hold_what_they_are_for() -> None:
    steps = [Step(seed, torch.float32, 40) for seed in SEEDS[torch.float32]]
    requests = [request for step in steps for request in zip(step.starts, step.spans, strict=True)]
    assert any(len(step.starts) > 1 for step in steps)
    assert any(start == 0 and spans for start, spans in requests)
    assert any(first < start <= last for start, spans in requests for first, last in spans), "hits inside images"
    assert any(last + 1 == spans[i + 1][0] for _, spans in requests for i, (_, last) in enumerate(spans[:-1]))
    assert len({step.heads // step.kv_heads for step in steps}) > 1
    assert len({step.block_size for step in steps}) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_kernel_equals_reference(rule: Rule, dtype: torch.dtype) -> None:
    distances = [Step(seed, dtype, rule.longest).distance(rule) for seed in SEEDS[dtype]]
    print(f"max |delta| {max(distances):.1e}")  # shown by pytest -rP
    assert max(distances) <= TOLERANCE[dtype], distances


@pytest.mark.parametrize("rule", [GEMMA3_SLIDING, GEMMA4_SLIDING], ids=["gemma3", "gemma4"])
def test_one_row_per_request(rule: Rule) -> None:
    """A step of decode rows takes another form of the kernel; a row may be the last one of an image."""
    assert max(Step(seed, torch.float32, rule.longest, only_last=True).distance(rule) for seed in range(2)) <= 1e-4


def test_spans_left_out_are_seen() -> None:
    """Negative control: images that attend causally are far from the reference."""
    distances = [Step(seed, torch.float32, 40).distance(GEMMA3_FULL, use_spans=False) for seed in range(2)]
    print(f"max |delta| {max(distances):.1e}")
    assert max(distances) > 0.1


@pytest.mark.parametrize(
    "wrong",
    [Rule(16, False, 40), Rule(17, True, 40), Rule(0, True, 40)],
    ids=["image-overrides-window", "one-token-more", "no-window"],
)
def test_wrong_window_is_seen(wrong: Rule) -> None:
    """Negative control: Gemma 4's images are longer than this window, so each other rule is far from the reference."""
    distances = [Step(seed, torch.float32, 40).distance(wrong, of=GEMMA4_SLIDING) for seed in range(2)]
    print(f"max |delta| {max(distances):.1e}")
    assert max(distances) > 0.1


def test_another_requests_images_are_seen() -> None:
    """Negative control: spans given to the wrong request of a batch are far from the reference."""
    steps = [Step(seed, torch.float32, 40) for seed in range(8)]
    distances = []
    for step in [step for step in steps if len(step.spans) > 1 and step.spans[0] != step.spans[1]][:2]:
        right, step.spans = step.spans, [*step.spans[1:], step.spans[0]]
        found = step.triton(GEMMA3_FULL)
        step.spans = right
        distances.append(float((found - step.naive(0)).abs().max()))
    print(f"max |delta| {max(distances):.1e}")
    assert max(distances) > 0.1


@pytest.mark.parametrize("dtype", list(SEEDS))
def test_the_naive_form_reads_the_pages_of_a_gpu(dtype: torch.dtype) -> None:
    """As vLLM's own code writes them."""
    for seed in SEEDS[dtype]:
        step = Step(seed, dtype, 40)
        step.triton(GEMMA3_FULL)
        for i, (key, value) in enumerate(zip(step.keys, step.values, strict=True)):
            assert all(map(torch.equal, step.read_back(i), (key, value)))
