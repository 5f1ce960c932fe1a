# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of a step are cut, so that a state can be taken at each cut. Pure, no vLLM.

The pieces follow each other in the order of the step's tokens, so each is a slice of them, and no token is moved. A
piece can hold the end of one request, several whole ones, and the beginning of another, which the next one goes on
with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

CUTS = "mmcache_cuts"
"""The attribute of a step, vLLM's SchedulerOutput, that holds its cuts by request; a step without any has none."""


@dataclass(frozen=True)
class Cut:
    """A checkpoint strictly inside the tokens that a step computes of one request."""

    offset: int
    """Tokens of the request that the step computes before it."""
    blocks: Mapping[int, int]
    """The block that its state goes into, by KV cache group."""


@dataclass(frozen=True)
class Piece:
    """A slice of a step's tokens, to be computed in one call."""

    tokens: slice
    rows: slice
    """The requests that it holds tokens of, by their place in the batch."""
    starts: tuple[int, ...]
    """Where each of these requests begins in the piece, and at last the piece's length."""
    goes_on: bool
    """Whether its first request begins in an earlier piece."""
    row: int = -1
    """The request that is cut at its end; without meaning in the last piece."""
    cut: Cut | None = None
    """What it ends at; None in the last piece."""


def pieces_of(lengths: Sequence[int], cuts: Mapping[int, Sequence[Cut]]) -> list[Piece]:
    """The pieces of a step whose requests have so many tokens, with the cuts of some of them by place in the batch.

    The cuts of a request are in the order of its tokens. Raises: ValueError, where one is not inside its request.
    """
    starts = [0, *accumulate(lengths)]
    pieces: list[Piece] = []
    first, first_row, goes_on = 0, 0, False

    def piece(end: int, row: int, cut: Cut | None) -> Piece:
        inside = (min(max(start, first), end) - first for start in starts[first_row : row + 2])
        return Piece(slice(first, end), slice(first_row, row + 1), tuple(inside), goes_on, row, cut)

    for row in sorted(cuts):
        for cut in cuts[row]:
            end = starts[row] + cut.offset
            if not max(first, starts[row]) < end < starts[row + 1]:
                raise ValueError(
                    f"a cut after {cut.offset} tokens is not inside {lengths[row]} tokens, or out of order"
                )
            pieces.append(piece(end, row, cut))
            first, first_row, goes_on = end, row, True
    pieces.append(piece(starts[-1], len(lengths) - 1, None))
    return pieces
