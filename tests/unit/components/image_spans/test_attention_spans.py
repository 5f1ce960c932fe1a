# SPDX-License-Identifier: Apache-2.0
"""Cutting a step into pseudo-sequences shows each row exactly the keys that the mask allows, on random layouts.

How the kernel bounds a row is checked on the kernel itself, in test_kernel.py.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_mmcache.components.image_spans.attention_spans import Piece, cut, cut_step, wider
from vllm_mmcache.reference_attention.naive import allowed

pytestmark = pytest.mark.answers

Span = tuple[int, int]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[Span]]:
    """Length of a prompt, and its spans."""
    spans = []
    position = 0
    for _ in range(draw(st.integers(0, 4))):
        position += draw(st.integers(0, 6))
        length = draw(st.integers(1, 20))
        spans.append((position, position + length - 1))
        position += length + 1  # two images never touch: a marker stands between them
    return position + draw(st.integers(1, 8)), spans


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, list[Span]]:
    """Start and end of a step, and spans of which none is split by the end of the step."""
    total, spans = draw(layouts())
    start = draw(st.integers(0, total - 1))
    ends = [e for e in range(start + 1, total + 1) if not any(first < e <= last for first, last in spans)]
    return start, draw(st.sampled_from(ends or [total])), spans


def show(mask: torch.Tensor, row: int, piece: Piece, window: int) -> None:
    """Write what the kernel shows the piece's rows into the mask; `window - 1` keys to each side, 0 is no window."""
    for i in range(piece.num_rows):
        position = piece.seq_len - piece.num_rows + i
        end = position + 1 if piece.causal else min(piece.seq_len, position + (window or piece.seq_len))
        mask[row + i] = False
        mask[row + i, max(0, position - window + 1) if window else 0 : end] = True


def seen(pieces: list[Piece], start: int, end: int, window: int = 0) -> torch.Tensor:
    """What the pieces let each row see, as the kernel reads them."""
    mask = torch.zeros(end - start, end, dtype=torch.bool)
    row = 0
    for piece in pieces:
        show(mask, row, piece, window)
        row += piece.num_rows
    assert row == end - start
    return mask


@given(steps())
def test_pieces_show_what_the_mask_allows(step: tuple[int, int, list[Span]]) -> None:
    start, end, spans = step
    assert torch.equal(seen(cut(0, start, end, spans), start, end), allowed(start, end, spans, 0))


@pytest.mark.slow
@given(steps(), st.integers(1, 24))
def test_wider_pieces_show_what_the_mask_allows(step: tuple[int, int, list[Span]], window: int) -> None:
    """Also images that are longer than the window, many times."""
    start, end, spans = step
    pieces = cut(0, start, end, spans)
    mask = seen(pieces, start, end, window)
    for wide, again in wider(pieces, window).items():
        for row, piece in again:
            show(mask, row, piece, wide)
    assert torch.equal(mask, allowed(start, end, spans, window))


def test_images_that_fit_the_window_are_computed_once() -> None:
    pieces = cut(0, 0, 40, [(2, 9), (20, 27)])
    assert wider(pieces, 8) == {}
    assert wider(pieces, 7) == {14: [(2, Piece(0, 1, 10, False)), (20, Piece(0, 1, 28, False))]}


def test_without_wider_pieces_a_longer_image_is_not_seen() -> None:
    """Negative control: the kernel bounds a row on the right, too."""
    assert not torch.equal(seen(cut(0, 0, 12, [(2, 9)]), 0, 12, 4), allowed(0, 12, [(2, 9)], 4))


@pytest.mark.slow
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
