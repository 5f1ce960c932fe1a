# SPDX-License-Identifier: Apache-2.0
"""Where two prompts have the same again: what is proposed by hashes is compared, and the work is bounded."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from vllm_mmcache.components.observe.record import resync, wire
from vllm_mmcache.components.observe.record.resync import MIN_MOVED_TOKENS, MIN_SHARED_TOKENS, Place, Resync

START = 1000


def between(
    ours: Sequence[int],
    theirs: Sequence[int],
    our_spans: Sequence[wire.Span] = (),
    their_spans: Sequence[wire.Span] = (),
) -> Resync:
    return Resync(START, array("i", ours), array("i", theirs), our_spans, their_spans)


def first(comparison: Resync) -> Place | None:
    return comparison.next(Place(START, START))


@pytest.mark.parametrize("shift", range(resync.STRIDE))
def test_every_run_that_is_long_enough_is_found_where_it_begins(shift: int) -> None:
    for length in (MIN_SHARED_TOKENS - 1, MIN_SHARED_TOKENS):
        run = list(range(100, 100 + length))
        found = first(between([*range(9), *run, 1, 1], [*range(20, 27 + shift), *run, 2, 2]))
        assert found == (Place(START + 9, START + 7 + shift) if length == MIN_SHARED_TOKENS else None)


def test_hashes_only_propose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all collide, what is found is the same."""
    run = list(range(100, 140))
    given = [*range(9), *run, 1, 1], [*range(20, 27), *run, 2, 2]
    monkeypatch.setattr(resync, "_known", lambda hashes, among: np.arange(len(hashes)))
    assert first(between(*given)) == Place(START + 9, START + 7)
    monkeypatch.setattr(resync, "PLACES", len(given[1]))
    monkeypatch.setattr(resync, "_hashes", lambda content, stride: np.zeros((len(content) - 7) // stride, np.uint64))
    found = first(between(*given))
    assert found == Place(START + 9, START + 7)


def test_what_was_taken_is_not_found_again() -> None:
    run = list(range(100, 200))
    comparison = between([1, *run, *run], [2, *run, 3, *run[:50]])
    place = first(comparison)
    assert place == Place(START + 1, START + 1)
    assert comparison.go_on(place) == 100
    behind = comparison.next(Place(place.ours + 100, place.theirs + 100))
    assert behind == Place(START + 101, START + 102)
    assert comparison.go_on(behind) == 50
    assert comparison.next(Place(behind.ours + 50, behind.theirs + 50)) is None
    assert comparison.take(Place(START + 101, START), 3) == 1, "of three tokens, one was not taken"


@pytest.mark.parametrize("length", [MIN_MOVED_TOKENS - 1, MIN_MOVED_TOKENS])
def test_a_piece_that_stood_further_in_front_must_be_longer(length: int) -> None:
    moved, rest = list(range(100, 100 + length)), list(range(1000, 1100))
    comparison = between([*rest, *moved], [*moved, *rest])
    assert first(comparison) == Place(START, START + length)
    comparison.go_on(Place(START, START + length))
    found = comparison.next(Place(START + 100, START + length + 100))
    assert found == (Place(START + 100, START) if length == MIN_MOVED_TOKENS else None)


def test_images_are_compared_by_name_and_whole() -> None:
    tokens = [7] * 60
    a, b = (START + 10, 40, "a"), (START + 14, 40, "b")
    assert first(between([1, *tokens], [2, *tokens], [a], [b])) is None
    same = (START + 14, 40, "a")
    found = between([1, *tokens], [2, *tokens], [a], [same])
    place = first(found)
    assert place is not None
    assert place.theirs - place.ours == 4
    cut = between(tokens[:30], tokens[:30], [(START - 20, 50, "a")], [(START - 20, 50, "a")])
    assert cut.go_on(Place(START, START)) == 30, "an image in which the comparison begins"
    shifted = between(tokens[:30], tokens[:30], [(START - 20, 50, "a")], [(START - 10, 50, "a")])
    assert shifted.go_on(Place(START, START)) == 0


def test_the_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that agree in very many pieces, each too short to count."""
    compared = []
    common = Resync._common

    def counted(self: Any, our: int, their: int) -> int:
        compared.append(1)
        return common(self, our, their)

    monkeypatch.setattr(Resync, "_common", counted)
    length = 20_000
    comparison = between(([7] * (MIN_SHARED_TOKENS - 1) + [8]) * (length // MIN_SHARED_TOKENS), [7] * length)
    for _ in range(2):
        assert first(comparison) is None
        assert resync.MOST_TRIES <= len(compared) < resync.MOST_TRIES + 2 * resync.PLACES
