# SPDX-License-Identifier: Apache-2.0
"""Requests that wait to be audited: a few, for a short time, within a budget of memory. Pure, no vLLM.

A sample holds the inputs of its images, which would else be free: so there are few, and none stays for long.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST_WAITING = 4
MOST_BYTES = 256 << 20
LONGEST_WAIT_S = 60.0
"""What it would be compared with is hardly cached any more after that."""


@dataclass(frozen=True)
class Sample:
    """What is needed to ask for a request's first token again."""

    name: str
    """A digest of the request's id."""
    token_ids: Sequence[int]
    features: Sequence[Any]
    """vLLM's, with the inputs of the images."""
    namer: bytes | None
    """Who has named its images (content/image_namer.py)."""
    salt: str | None
    components: frozenset[str]
    """Those that gave it something."""
    hit_tokens: int
    num_bytes: int
    """Of the inputs."""
    time_s: float
    """When it finished, of the monotonic clock."""

    def describe(self) -> str:
        """What is needed to reproduce it, without its content: positions and sizes."""
        images = ", ".join(f"{f.mm_position.length} at {f.mm_position.offset}" for f in self.features)
        return f"{len(self.token_ids)} tokens, {self.hit_tokens} of them cached, images of ({images}) tokens"


class Samples:
    """The samples that wait, the oldest first. One thread."""

    def __init__(self) -> None:
        self._waiting: deque[Sample] = deque()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def has_room(self, num_bytes: int) -> bool:
        """Whether one more of this size may wait."""
        return len(self._waiting) < MOST_WAITING and self._num_bytes + num_bytes <= MOST_BYTES

    def add(self, sample: Sample) -> None:
        """Have one wait."""
        self._waiting.append(sample)
        self._num_bytes += sample.num_bytes

    def take(self) -> Sample | None:
        """The oldest, which waits no longer; None where none does."""
        if not self._waiting:
            return None
        sample = self._waiting.popleft()
        self._num_bytes -= sample.num_bytes
        return sample

    def take_old(self, now_s: float) -> list[Sample]:
        """Those that have waited too long."""
        old = []
        while self._waiting and now_s - self._waiting[0].time_s > LONGEST_WAIT_S:
            if (sample := self.take()) is not None:
                old.append(sample)
        return old

    def take_all(self) -> list[Sample]:
        """All of them."""
        samples = list(self._waiting)
        self._waiting.clear()
        self._num_bytes = 0
        return samples
