# SPDX-License-Identifier: Apache-2.0
"""Cutting a step into pseudo-sequences shows each row exactly the keys that the mask allows, on random layouts."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_mmcache.attention.reference import allowed
from vllm_mmcache.attention.spans import Piece, cut, cut_step

Span = tuple[int, int]


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, list[Span]]:
    """Start and end of a step, and spans of which none is split by the end of the step."""
    spans = []
    position = 0
    for _ in range(draw(st.integers(0, 4))):
        position += draw(st.integers(0, 6))
        length = draw(st.integers(1, 7))
        spans.append((position, position + length - 1))
        position += length
    total = position + draw(st.integers(1, 8))
    start = draw(st.integers(0, total - 1))
    ends = [e for e in range(start + 1, total + 1) if not any(first < e <= last for first, last in spans)]
    return start, draw(st.sampled_from(ends or [total])), spans


def seen(pieces: list[Piece], start: int, end: int) -> torch.Tensor:
    """What the pieces let each row see, as the kernel reads them; no sliding window."""
    mask = torch.zeros(end - start, end, dtype=torch.bool)
    row = 0
    for piece in pieces:
        first = piece.seq_len - piece.num_rows
        for i in range(piece.num_rows):
            mask[row, : (first + i + 1) if piece.causal else piece.seq_len] = True
            row += 1
    assert row == end - start
    return mask


@given(steps())
def test_pieces_show_what_the_mask_allows(step: tuple[int, int, list[Span]]) -> None:
    start, end, spans = step
    assert torch.equal(seen(cut(0, start, end, spans), start, end), allowed(start, end, spans, 0))


@given(steps())
def test_without_spans_nothing_is_cut(step: tuple[int, int, list[Span]]) -> None:
    start, end, _ = step
    assert cut(3, start, end, ()) == [Piece(3, end - start, end, True)]
    assert cut_step([start], [end], {}) is None


def test_spans_of_the_past_and_the_future_change_nothing() -> None:
    assert cut_step([10], [20], {0: [(2, 8), (20, 30)]}) is None
    assert cut_step([10], [20], {0: [(2, 10)]}) is not None


def test_requests_without_rows_keep_their_place() -> None:
    pieces = cut_step([0, 4, 5], [3, 4, 6], {0: [(1, 2)]})
    assert pieces == [Piece(0, 1, 1, True), Piece(0, 2, 3, False), Piece(1, 0, 4, True), Piece(2, 1, 6, True)]


def test_a_dropped_span_is_seen() -> None:
    """Negative control: rows of an image cut as text see less than the mask allows."""
    assert not torch.equal(seen(cut(0, 0, 8, ()), 0, 8), allowed(0, 8, [(2, 5)], 0))
