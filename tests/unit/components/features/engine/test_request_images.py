# SPDX-License-Identifier: Apache-2.0
"""Which images of a request come next, as its computing goes on and back."""

from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.packages import SHAPE
from vllm_mmcache.components.features.engine.request_images import RequestImages, WantedImage

LENGTH, GAP = 16, 4


def image(offset: int) -> WantedImage:
    feature = SimpleNamespace(
        mm_position=SimpleNamespace(offset=offset, length=LENGTH), identifier=f"image at {offset}", modality="image"
    )
    return WantedImage(feature, SHAPE, is_kept=True, comes_without_pixels=False)


class Placed:
    """Images in a row, and the list of features that vLLM's request has."""

    def __init__(self, count: int) -> None:
        self.all = [image(number * (LENGTH + GAP)) for number in range(count)]
        self.features: list[Any] = [one.feature for one in self.all]
        self.images = RequestImages()
        self.images.add(self.all)
        self.images.place(self.features)

    def numbers(self, found: list[WantedImage]) -> list[int]:
        return [self.all.index(one) for one in found]

    def looks_for(self) -> list[int]:
        """The images that something is begun for now."""
        found = []
        while (one := self.images.next_to_look_for()) is not None:
            self.images.looked()
            found.append(one)
        return self.numbers(found)


@pytest.mark.parametrize(
    ("num_computed", "expected"), [(0, [0, 1]), (LENGTH - 1, [0, 1]), (LENGTH, [1]), (LENGTH + GAP, [1, 2]), (1000, [])]
)
def test_what_a_step_may_need(num_computed: int, expected: list[int]) -> None:
    """An image that computing ends in is needed as a whole."""
    placed = Placed(4)
    placed.images.advance(num_computed)
    assert placed.numbers(placed.images.near(LENGTH + GAP + 1)) == expected


def test_what_is_expected_to_be_cached_and_is_not() -> None:
    """Is looked for then, and what was looked for before is in the list once more."""
    placed = Placed(4)
    placed.images.look_from(2 * (LENGTH + GAP))
    assert placed.looks_for() == [2, 3]
    placed.images.advance(LENGTH)
    assert placed.looks_for() == [1, 2, 3]
    placed.images.advance(LENGTH)
    assert placed.looks_for() == [], "once"


def test_a_request_that_begins_anew() -> None:
    """As after a preemption: its images have a new time to come, and are looked for again."""
    placed = Placed(3)
    placed.looks_for()
    first, _, last = placed.all
    for one in placed.all:
        one.fetch, one.until = SimpleNamespace(is_done=True), 5.0  # type: ignore[assignment]
    assert placed.numbers(placed.images.advance(2 * (LENGTH + GAP))) == [0, 1]
    assert placed.numbers(placed.images.advance(3 * (LENGTH + GAP))) == [2]
    assert (last.fetch, last.until) != (None, None), "the control"
    assert placed.images.advance(LENGTH) == []
    assert (last.fetch, last.until) == (None, None)
    assert first.until == 5.0
    assert placed.looks_for() == [1, 2]


def test_what_comes_later_in_a_session() -> None:
    """Has no place before vLLM gives it one, and the right one then."""
    placed, later = Placed(1), image(0)
    placed.images.add([later])
    placed.images.place(placed.features)
    placed.images.advance(LENGTH)
    assert placed.images.near(1000) == []
    later.feature.mm_position = SimpleNamespace(offset=100, length=LENGTH)
    placed.features.append(later.feature)
    placed.images.place(placed.features)
    assert placed.images.near(1000) == [later]
    assert placed.images.of(later.feature) is later


def test_a_request_whose_images_are_all_computed() -> None:
    """Needs no look in the steps of its answer, until it begins anew or has more images."""
    placed, later = Placed(2), image(0)
    end = placed.all[-1].end
    placed.images.advance(end - 1)
    assert placed.images.settled_from == inf, "the control"
    placed.images.advance(end)
    assert placed.images.settled_from == end
    placed.images.add([later])
    assert placed.images.settled_from == inf
    placed.images.advance(end)
    assert placed.images.settled_from == inf, "its place is not known"
