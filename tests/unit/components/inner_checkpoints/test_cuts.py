# SPDX-License-Identifier: Apache-2.0
"""The pieces of a step are its tokens in order, and each cut is where a piece ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mmcache.components.inner_checkpoints.cuts import Cut, Piece, pieces_of


def cut(offset: int) -> Cut:
    return Cut(offset, {0: offset})


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], dict[int, list[Cut]]]:
    """Lengths of requests, decodes first, and cuts of some that are longer than one token."""
    lengths = [1] * draw(st.integers(0, 3)) + draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    rows = [row for row, length in enumerate(lengths) if length > 1]
    cuts = {
        row: [cut(offset) for offset in sorted(draw(st.sets(st.integers(1, lengths[row] - 1), min_size=1)))]
        for row in rows
        if draw(st.booleans())
    }
    return lengths, cuts


@given(steps())
def test_every_token_is_in_one_piece_and_every_cut_ends_one(step: tuple[list[int], dict[int, list[Cut]]]) -> None:
    lengths, cuts = step
    tokens = [(row, number) for row, length in enumerate(lengths) for number in range(length)]
    seen: list[tuple[int, int]] = []
    ends = []
    for piece in pieces_of(lengths, cuts):
        inside = tokens[piece.tokens]
        rows = range(len(lengths))[piece.rows]
        starts = dict(zip(rows, zip(piece.starts, piece.starts[1:], strict=False), strict=True))
        assert {row: [number for r, number in inside if r == row] for row in rows} == {
            row: [number for _, number in inside[start:end]] for row, (start, end) in starts.items()
        }
        assert all(start < end for start, end in starts.values()), "no request without a token"
        assert piece.goes_on == (inside[0][1] > 0)
        if piece.cut is not None:
            assert inside[-1] == (piece.row, piece.cut.offset - 1)
            ends.append((piece.row, piece.cut))
        seen += inside
    assert seen == tokens
    assert ends == [(row, one) for row in sorted(cuts) for one in cuts[row]]


def test_without_a_cut_there_is_one_piece() -> None:
    assert pieces_of([1, 5], {}) == [Piece(slice(0, 6), slice(0, 2), (0, 1, 6), goes_on=False, row=1)]


@pytest.mark.parametrize("offsets", [[0], [5], [9], [3, 3], [4, 2]])
def test_a_cut_that_is_not_inside_its_request_is_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="not inside"):
        pieces_of([4, 5, 6], {1: [cut(offset) for offset in offsets]})
