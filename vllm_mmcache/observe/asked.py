# SPDX-License-Identifier: Apache-2.0
"""A request as the API server saw it: kept there until the engine's outcome arrives, then in its record's recipe.

API server. Of text it has digests only.
"""

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass

MOST_WAITING = 16384  # of some 4 KiB each

Layers = tuple[int, int, str, str, str]
"""What happened to an image before the engine: width and height in pixels; body, decode, processor."""
UNKNOWN: Layers = (0, 0, "unknown", "unknown", "unknown")


@dataclass(slots=True)
class Asked:
    """One request. turns and the first two of spans: positions in tokens."""

    id: str
    time_s: float
    prompt_tokens: int
    lora: str
    salt: str
    """Digest of the cache_salt."""
    num_answers: int
    turns: Sequence[int]
    roles: Sequence[str]
    answers: Sequence[int | None]
    """Digests of the assistant's messages; None for one that only calls tools."""
    spans: Sequence[tuple[int, int, str]]
    """offset, length, vLLM's identifier of each image."""
    layers: Sequence[Layers]

    def is_echo(self, turn: int, given: Container[int]) -> bool:
        """Whether the assistant's turn is one of the answers that were given, sent back word for word."""
        place = [index for index, role in enumerate(self.roles) if role == "assistant"].index(turn)
        if place >= len(self.answers):
            return False
        digest = self.answers[place]
        return digest is None or digest in given


class Waiting:
    """Requests that have gone to an engine, by a number that no other request of this process has. Bounded."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._kept: dict[int, Asked] = {}

    def add(self, asked: Asked) -> int:
        """Keep a request; returns its number, from 1."""
        number = next(self._numbers)
        self._kept[number] = asked
        if len(self._kept) > MOST_WAITING:
            self._kept.pop(next(iter(self._kept)), None)
        return number

    def take(self, number: int) -> Asked | None:
        """The request of that number, once for each of its answers; None if it had to go, or was never there."""
        asked = self._kept.get(number)
        if asked is not None:
            asked.num_answers -= 1
            if asked.num_answers <= 0:
                self._kept.pop(number, None)
        return asked
