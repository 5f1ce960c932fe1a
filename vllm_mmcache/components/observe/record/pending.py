# SPDX-License-Identifier: Apache-2.0
"""A request as the API server saw it, kept until the engine's outcome arrives.

From then on it is held by its record's recipe, the function that makes the record when somebody reads it first
(store.py). API server process. Of text it has digests only.
"""

import itertools
import secrets
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property

MOST_WAITING = 16384  # of some 4 KiB each

Layers = tuple[int, int, str, str, str]
"""What happened to an image before the engine: width and height in pixels; body, decode, processor."""
UNKNOWN: Layers = (0, 0, "unknown", "unknown", "unknown")


@dataclass(slots=True)
class RequestSnapshot:
    """One request. turns, and the first two of spans, are in tokens from the prompt's start.

    Units: time_s in seconds since the epoch.
    """

    request_id: str
    """As the client sees it, who may have chosen it."""
    time_s: float
    prompt_tokens: int
    lora: str
    salt: str
    """Its class; see digests.salt_class."""
    num_answers: int
    turns: Sequence[int]
    roles: Sequence[str]
    answers: Sequence[int | None]
    """Digests of the assistant's messages; None for one that only calls tools."""
    spans: Sequence[tuple[int, int, str]]
    """offset, length, vLLM's identifier of each image."""
    layers: Sequence[Layers]

    def is_echo(self, turn: int, given: Container[tuple[str, int]]) -> bool:
        """Whether the assistant's turn is an answer that was given under this salt, sent back word for word."""
        place = [index for index, role in enumerate(self.roles) if role == "assistant"].index(turn)
        if place >= len(self.answers):
            return False
        digest = self.answers[place]
        return digest is None or (self.salt, digest) in given


class PendingRequests:
    """Requests that have gone to an engine, by an id that no other request of any process has. Bounded."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._kept: dict[str, RequestSnapshot] = {}

    @cached_property
    def _token(self) -> str:
        """Of this process; made with its first request, since processes are forked before."""
        return secrets.token_hex(4)

    def add(self, asked: RequestSnapshot) -> str:
        """Keep a request; returns the id that its record will have."""
        record_id = f"{self._token}-{next(self._numbers)}"
        self._kept[record_id] = asked
        if len(self._kept) > MOST_WAITING:
            self._kept.pop(next(iter(self._kept)), None)
        return record_id

    def salt_of(self, record_id: str) -> str | None:
        """The class of a request's salt; None if it is not known."""
        asked = self._kept.get(record_id)
        return asked.salt if asked is not None else None

    def take(self, record_id: str) -> RequestSnapshot | None:
        """The request of that id, once for each of its answers; None if it had to go, or was never there.

        API server process; a thread that reads notes (`Recorder.read_notes`), one at a time.
        """
        asked = self._kept.get(record_id)
        if asked is not None:
            asked.num_answers -= 1
            if asked.num_answers <= 0:
                self._kept.pop(record_id, None)
        return asked
