# SPDX-License-Identifier: Apache-2.0
"""Where a prompt goes on as an earlier request does, behind a difference between the two. Scheduler thread; pure.

Both are arrays of numbers: a token is its id, and the tokens of an image are negative numbers that no other image has,
so that equal numbers are equal content. The time is linear in their lengths: candidates come from hashes of GRAM tokens
at every position of the prompt and at every STRIDE-th one of the earlier request, and each is compared before it
counts. What both have at one place is taken there, so that no token of the earlier request counts twice.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_mmcache.components.observe.record import wire

if TYPE_CHECKING:
    from array import array

MIN_SHARED_TOKENS = 16  # shorter pieces (headers, a template's frame of a turn) recur by themselves
MIN_MOVED_TOKENS = 64  # the same of pieces that stood further in front: a question that is asked of each image recurs
GRAM = 8
STRIDE = MIN_SHARED_TOKENS - GRAM  # so every run of MIN_SHARED_TOKENS has a whole gram that begins at a multiple of it
PLACES = 4  # of a gram that recurs in the earlier request: how many of its places are tried
MOST_TRIES = 1000  # of one prompt: how many places are compared; a usual one needs fewer than it has turns
_FILTER_BITS = 20
_FILTER_SHIFT = np.uint64(64 - _FILTER_BITS)
_FIRST_STEP_TOKENS = 64
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that no token of a gram is lost
_TAKEN, _IMAGES_FROM = -1, -2
_Tokens = np.ndarray[tuple[int], np.dtype[np.int32]]
_Hashes = np.ndarray[tuple[int], np.dtype[np.uint64]]


class Place(NamedTuple):
    """A position in the prompt, and one in the earlier request. Units: tokens, both."""

    ours: int
    theirs: int


class Resync:
    """A prompt and an earlier request, both from `start` on. Positions are in tokens from the beginning of a prompt.

    ours and theirs are the tokens behind `start`; the spans are those of the whole prompts.
    """

    def __init__(
        self,
        start: int,
        ours: "array[int]",
        theirs: "array[int]",
        our_spans: Sequence[wire.Span],
        their_spans: Sequence[wire.Span],
    ) -> None:
        self._start = start
        numbers = _numbers(our_spans, their_spans)
        self._ours = _content(start, ours, our_spans, numbers)
        self._theirs = _content(start, theirs, their_spans, numbers)
        self._grams: dict[int, list[int]] = {}
        self._candidates, self._hashes = self._find_candidates()
        self._next = self._tries = 0

    def go_on(self, place: Place) -> int:
        """How many tokens both have from a place on, which are taken."""
        our, their = place.ours - self._start, place.theirs - self._start
        tokens = self._common(our, their)
        self._theirs[their : their + tokens] = _TAKEN
        return tokens

    def take(self, place: Place, most: int) -> int:
        """Take so many tokens of the earlier request, whatever they are; returns how many were not taken before."""
        their = place.theirs - self._start
        free = int(np.count_nonzero(self._theirs[their : their + most] != _TAKEN))
        self._theirs[their : their + most] = _TAKEN
        return free

    def next(self, place: Place) -> Place | None:
        """Where, behind a place, the prompt goes on as the earlier request does anywhere; None where that is not found.

        It is the prompt's first such position, and if the earlier request has this several times, the next one behind
        the place. To be asked of later and later positions.
        """
        our, their = place.ours - self._start, place.theirs - self._start
        self._next = max(self._next, bisect_left(self._candidates, our))
        best: tuple[bool, int, int] | None = None
        for index in range(self._next, len(self._candidates)):
            if best is None:
                self._next = index
            # Each run that begins before a candidate has its own candidate in the STRIDE positions behind it.
            elif self._candidates[index] >= self._candidates[self._next] + STRIDE:
                break
            if self._tries >= MOST_TRIES:
                break
            for run in self._runs(index, our, their):
                best = min(best or run, run)
        return Place(best[2] + self._start, best[1] + self._start) if best else None

    def _runs(self, index: int, our: int, their: int) -> Iterator[tuple[bool, int, int]]:
        """What both have around a candidate: whether it stood before `their`, where it begins there, and where here."""
        at = self._candidates[index]
        for their_at in self._places(self._hashes[index], their):
            self._tries += 1
            is_moved = their_at < their
            back = self._common_before(at, their_at, at - our)
            if back + self._common(at, their_at) >= (MIN_MOVED_TOKENS if is_moved else MIN_SHARED_TOKENS):
                yield is_moved, their_at - back, at - back

    def _find_candidates(self) -> tuple[list[int], list[int]]:
        """Positions of the prompt whose gram the earlier request may have, too, and the hashes of these grams."""
        if min(len(self._ours), len(self._theirs)) < MIN_SHARED_TOKENS:
            return [], []
        ours, theirs = _hashes(self._ours, 1), _hashes(self._theirs, STRIDE)
        found = _known(ours, theirs)
        kept = _known(theirs, ours[found])
        for gram, at in zip(theirs[kept].tolist(), (kept * STRIDE).tolist(), strict=True):
            self._grams.setdefault(gram, []).append(at)
        return found.tolist(), ours[found].tolist()

    def _places(self, gram: int, their: int) -> Iterator[int]:
        """Where the earlier request has a gram: behind a position first, then before it."""
        places = self._grams.get(gram, ())
        at = bisect_left(places, their)
        yield from places[at : at + PLACES]
        yield from places[max(at - PLACES, 0) : at]

    def _common(self, our: int, their: int) -> int:
        """How many tokens both have from there on, compared in steps that grow, so that short runs cost little."""
        end = min(len(self._ours) - our, len(self._theirs) - their)
        found, step = 0, _FIRST_STEP_TOKENS
        while found < end:
            until = min(found + step, end)
            differ = self._ours[our + found : our + until] != self._theirs[their + found : their + until]
            first = int(differ.argmax())
            if differ[first]:
                return found + first
            found, step = until, step * 2
        return max(end, 0)

    def _common_before(self, our: int, their: int, most: int) -> int:
        back = 0
        while back < min(most, their) and self._ours[our - back - 1] == self._theirs[their - back - 1]:
            back += 1
        return back


def _numbers(*prompts: Sequence[wire.Span]) -> dict[tuple[str, int], int]:
    """Of each image the number of its first token; those of its others are the next lower ones."""
    numbers: dict[tuple[str, int], int] = {}
    first = _IMAGES_FROM
    for _, length, name in itertools.chain(*prompts):
        if (name, length) not in numbers:
            numbers[name, length] = first
            first -= length
    return numbers


def _content(
    start: int, tokens: "array[int]", spans: Sequence[wire.Span], numbers: dict[tuple[str, int], int]
) -> _Tokens:
    """The tokens behind `start`, those of images replaced."""
    content = np.array(tokens, np.int32)
    for offset, length, name in spans:
        begin, end = max(offset, start), min(offset + length, start + len(content))
        if begin < end:
            first = numbers[name, length] + offset
            content[begin - start : end - start] = np.arange(first - begin, first - end, -1)
    return content


def _hashes(content: _Tokens, stride: int) -> _Hashes:
    """Of the GRAM tokens that begin at each multiple of `stride`."""
    numbers, last = content.astype(np.uint64), len(content) - GRAM + 1
    found = np.zeros(len(range(0, last, stride)), np.uint64)
    for step in range(GRAM):
        found += numbers[step : step + last : stride]
        found *= _FACTOR
    return found


def _known(hashes: _Hashes, among: _Hashes) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Where there are hashes that are among the others; about one in 100 of those that are not is found, too."""
    seen = np.zeros(1 << _FILTER_BITS, np.bool_)
    seen[among >> _FILTER_SHIFT] = True
    return np.flatnonzero(seen[hashes >> _FILTER_SHIFT])
