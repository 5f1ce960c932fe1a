# SPDX-License-Identifier: Apache-2.0
"""The images of one request: which of them come next, and what was begun for each. Engine process; knows no vLLM.

A request is computed from its start, and from where the prefix cache ends. So what lies before that place is not
needed, and what lies behind it is needed in its order. The place may go back: a request that was preempted begins anew.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Any

from vllm_mmcache.components.features.engine.ram_tier import Slot
from vllm_mmcache.components.features.engine.store import Fetch
from vllm_mmcache.components.features.package import Shape


@dataclass(eq=False)
class WantedImage:
    """One image or video of a request, and what was begun to have its features."""

    feature: Any
    """vLLM's: its data is replaced where pixels are made after all."""
    shape: Shape
    is_kept: bool
    """Whether its features are; else it is here for its pixels alone."""
    comes_without_pixels: bool
    pixels: Any = None
    """What the processor made of it, where its name does not say what it shows, until that is found out; else None."""
    identifier: str = ""
    """That of its features; empty where they are not kept, and until it is known what the pixels show."""
    fetch: Fetch | None = None
    until: float | None = None
    """When the request goes on without it; from the first time that it could have been scheduled."""
    making: "Future[Any] | None" = None
    """Of its pixels, where it came without them and they are needed."""
    held: Slot | None = None
    """Where its features lie in RAM, held to the end of the step for which it was looked at."""
    begun_bytes: int = 0
    """Of RAM, for what was begun for it and is not used yet."""
    is_retried: bool = False
    """Whether what was found has gone before its turn, and is looked for once more."""

    @property
    def name(self) -> str:
        """vLLM's, under which it is cached."""
        return str(self.feature.identifier)

    @property
    def modality(self) -> str:
        """Such as "image"."""
        return str(self.feature.modality)

    @property
    def start(self) -> int:
        """Of its tokens in the prompt."""
        return int(self.feature.mm_position.offset)

    @property
    def end(self) -> int:
        """Of its tokens in the prompt, exclusive."""
        return int(self.feature.mm_position.offset + self.feature.mm_position.length)

    def give_up(self) -> None:
        """Its features are not kept any more: it is here for its pixels alone. The caller has released `held`."""
        self.is_kept, self.identifier, self.pixels = False, "", None
        self.fetch = self.held = self.until = None

    def begin_anew(self) -> None:
        """It is to be computed once more: what was found may have gone, and the wait for it begins again."""
        if self.fetch is not None and self.fetch.is_done:
            self.fetch = None
        if self.until:  # which is 0 where nobody will say what it is
            self.until = None
        self.is_retried = False


class RequestImages:
    """Those of one request's images that are kept or came without their pixels, in the order of the prompt.

    Scheduler's thread. `features` is always the list that vLLM's request has.
    """

    def __init__(self) -> None:
        self.latest_until = 0.0
        """The end of the longest wait for one of them so far."""
        self.begun_bytes = 0
        """Of RAM, for all of them."""
        self.settled_from = inf
        """The computed tokens from which on none of them is needed; infinite while one may be."""
        self._by_feature: dict[int, WantedImage] = {}  # by id(feature), which lives as long as the image does
        self._images: list[WantedImage] = []
        self._ends: list[int] = []  # the largest end so far
        self._num_features = 0
        self._num_computed = 0  # when it was last looked at
        self._first = 0  # the first that is not computed
        self._lowest = 0  # from here on images were looked at to begin something for them
        self._next = 0  # the first for which nothing was begun yet

    def __iter__(self) -> Iterator[WantedImage]:
        return iter(self._by_feature.values())

    def add(self, images: Iterable[WantedImage]) -> None:
        """Images whose place in the prompt may not be known yet: it is when their feature is in the request's list."""
        self._by_feature |= {id(image.feature): image for image in images}
        self.settled_from = inf

    def place(self, features: Sequence[Any]) -> None:
        """Take note of the features that the request has now; a session's grow."""
        if len(features) == self._num_features:
            return
        self._num_features = len(features)
        found = (self._by_feature.get(id(feature)) for feature in features)
        self._images = [image for image in found if image is not None]
        self._ends = list(accumulate((image.end for image in self._images), max))

    def of(self, feature: Any) -> WantedImage | None:
        """The image that a feature of the request is of; None where there is nothing to do for it."""
        return self._by_feature.get(id(feature))

    def look_from(self, num_tokens: int) -> None:
        """The first so many tokens need not be computed, as far as is known: what lies before is not looked for."""
        self._lowest = self._next = bisect_right(self._ends, num_tokens)

    def advance(self, num_computed: int) -> list[WantedImage]:
        """So many tokens are computed now, or cached. Returns the images that lie before and did not when last asked.

        Where it are fewer than before, images behind that place begin anew.
        """
        first = bisect_right(self._ends, num_computed)
        if num_computed < self._num_computed:
            for image in self._images[first:]:
                image.begin_anew()
            self._lowest = self._next = min(first, self._next)
        elif first < self._lowest:  # it was expected to be cached
            self._lowest = self._next = first
        passed = self._images[self._first : first]
        is_settled = first == len(self._images) == len(self._by_feature)
        self.settled_from = self._ends[-1] if is_settled and self._ends else inf
        self._first, self._num_computed = first, num_computed
        self._next = max(self._next, first)
        return passed

    def near(self, reach: int) -> list[WantedImage]:
        """Those that a step of `reach` tokens may need."""
        found = []
        for number in range(self._first, len(self._images)):
            image = self._images[number]
            if image.start >= self._num_computed + reach:
                break
            if image.end > self._num_computed:
                found.append(image)
        return found

    def next_to_look_for(self) -> WantedImage | None:
        """The first image for which nothing was begun yet; None where there is none. See `looked`."""
        return self._images[self._next] if self._next < len(self._images) else None

    def looked(self) -> None:
        """Something was begun for `next_to_look_for`."""
        self._next += 1
