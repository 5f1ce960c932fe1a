# SPDX-License-Identifier: Apache-2.0
"""Cuts a step's rows into pseudo-sequences so that image spans attend both ways. Pure, no vLLM.

A request's rows of one step are consecutive positions of its sequence. Rows outside image spans are causal: a causal
sequence that ends with them. The rows of one image span see everything up to the end of the span: a non-causal
sequence that ends with the span. Each pseudo-sequence keeps the request's block table, so keys and values are read
from the pages, whatever step wrote them.

In a sliding layer the kernel shows a row of a non-causal sequence `window - 1` keys to each side. The image's end may
be further away than that if the image is longer than the window; such rows are computed again with a wider window.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """One pseudo-sequence: num_rows rows whose last attends up to seq_len tokens of the request's sequence."""

    request: int  # index in the step
    num_rows: int
    seq_len: int
    causal: bool


def cut(request: int, start: int, end: int, spans: Iterable[tuple[int, int]]) -> list[Piece]:
    """Cut rows at positions start to end (exclusive) of a request at its image spans.

    spans are (first, last) positions, both inclusive, sorted and disjoint, as vLLM's `mm_req_doc_ranges` has them.
    A span of one row is causal: it has no later row of its own to see. A span that goes on beyond `end` can only be
    seen up to `end`; the scheduler's atomic images make sure that this does not happen.
    """
    pieces: list[Piece] = []
    position = start

    def add(until: int, causal: bool) -> None:
        nonlocal position
        if until > position:
            pieces.append(Piece(request, until - position, until, causal))
            position = until

    for first, last in spans:
        if last < position or first == last:
            continue
        if first >= end:
            break
        add(first, True)
        add(min(last + 1, end), False)
    add(end, True)
    return pieces


def cut_step(starts: Sequence[int], ends: Sequence[int], spans: dict[int, list[tuple[int, int]]]) -> list[Piece] | None:
    """Cut all requests of a step; None where no row of the step lies in a span, so that nothing need change.

    starts and ends are each request's first computed position and the position after its last.
    """
    pieces: list[Piece] = []
    for request, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if end > start:
            pieces += cut(request, start, end, spans.get(request, ()))
        else:
            pieces.append(Piece(request, 0, end, True))  # a padded request keeps its place
    return pieces if any(not piece.causal for piece in pieces) else None


def wider(pieces: Iterable[Piece], window: int) -> dict[int, list[tuple[int, Piece]]]:
    """What to compute again in a layer with a sliding window, since a row's image ends outside its window.

    A non-causal piece of n rows that ends with the image takes the last n positions before that end. If its rows are
    really d positions earlier, a window of `window + d` bounds them on the left where they must be bounded, and, as
    long as it is no less than n, not at all on the right. Windows are multiples of the real one by powers of two, so
    that all images of a step share a few kernel calls.

    Returns: by window, each piece with the step's row that it begins at. Rows that come up in no piece are right.
    """
    found: dict[int, list[tuple[int, Piece]]] = {}
    start = 0
    for piece in pieces:
        row, left = start, piece.num_rows
        start += piece.num_rows
        while not piece.causal and left > window:
            wide = 2 * window
            while left + window > 2 * wide:
                wide *= 2
            num_rows = left + window - wide
            found.setdefault(wide, []).append((row, Piece(piece.request, num_rows, piece.seq_len, False)))
            row, left = row + num_rows, left - num_rows
    return found
