# SPDX-License-Identifier: Apache-2.0
"""The clients of the chaos run: they ask about pictures for as long as it lasts, and know each answer beforehand.

An answer is compared token by token, with the log-probability of each. A request that was under way while the server
was killed is excused, and asked again when there is a server; every other one has to be answered, and rightly.
"""

import json
import math
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

from benchmarks.pictures import Kind, url_of
from benchmarks.servers import Reply, ask, image_part, request

PICTURE = Kind("image/png", (256, 256), 20, {"format": "PNG"})
QUESTIONS = ("What is this?", "Name the colours, from left to right.")
MORE = {"max_tokens": 8, "ignore_eos": True, "logprobs": True}
TIMEOUT_S = 60.0
PAUSE_S = 0.5  # after a failure
TOLERANCE = 1e-5  # of a log-probability, which is a float32 near 1
NEAR_TIE = 1e-2  # two tokens so close may change places where the batch is another
NUM_ERRORS = 5  # kept

Answer = tuple[tuple[str, float], ...]
"""The tokens, each with its log-probability."""
Pair = tuple[int, int]
"""Number of the picture, number of the question."""


def difference(expected: Answer, seen: Answer) -> float:
    """The largest difference of a log-probability; infinite where the tokens differ."""
    if [token for token, _ in expected] != [token for token, _ in seen]:
        return math.inf
    return max((abs(one - other) for (_, one), (_, other) in zip(expected, seen, strict=True)), default=0.0)


def confusable(answers: Mapping[Pair, Answer]) -> list[tuple[Pair, Pair]]:
    """The pairs that ask the same about two pictures and whose answers the comparison would take for one another."""
    return [
        (one, other)
        for one, other in combinations(sorted(answers), 2)
        if one[1] == other[1] and difference(answers[one], answers[other]) <= TOLERANCE
    ]


def asked(url: str, pictures: Sequence[str], pair: Pair, **more: Any) -> Reply:
    """The reply of a server to one question about one picture. Raises: RuntimeError, OSError."""
    content = [image_part(pictures[pair[0]]), {"type": "text", "text": QUESTIONS[pair[1]]}]
    body = json.dumps(request([{"role": "user", "content": content}], **MORE, **more)).encode()
    reply = ask(url, [body], TIMEOUT_S)
    if not reply.is_finished:
        raise RuntimeError(f"an answer that ends after {len(reply.answer)} tokens")
    return reply


def make_pictures(number: int) -> list[str]:
    """So many data URLs, the same in every run."""
    return [url_of(PICTURE, seed) for seed in range(number)]


def cold_answers(url: str, pictures: Sequence[str]) -> tuple[dict[Pair, Answer], int]:
    """The answer of a server to each pair, asked one at a time; and how many are left out, as near ties."""
    pairs = [(image, question) for image in range(len(pictures)) for question in range(len(QUESTIONS))]
    replies = {pair: asked(url, pictures, pair, top_logprobs=2) for pair in pairs}
    answers = {pair: reply.answer for pair, reply in replies.items() if reply.margin > NEAR_TIE}
    return answers, len(pairs) - len(answers)


@dataclass
class Found:
    """What the clients saw in one phase. Units: slowest_s is of an answered request."""

    requests: int = 0
    wrong: int = 0
    failed: int = 0
    excused: int = 0
    slowest_s: float = 0.0
    largest_difference: float = 0.0
    errors: list[str] = field(default_factory=list)

    def add(self, later: "Found") -> None:
        """What was seen later, too."""
        for name in ("requests", "wrong", "failed", "excused"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.slowest_s = max(self.slowest_s, later.slowest_s)
        self.largest_difference = max(self.largest_difference, later.largest_difference)
        self.errors = [*self.errors, *later.errors][:NUM_ERRORS]

    def as_dict(self) -> dict[str, Any]:
        rounded = {"slowest_s": round(self.slowest_s, 2), "largest_difference": float(f"{self.largest_difference:.1e}")}
        return {**asdict(self), **rounded}


class Clients:
    """So many threads that ask from `serve` to `down`, again and again, until the block ends."""

    def __init__(self, answers: Mapping[Pair, Answer], pictures: Sequence[str], number: int) -> None:
        self._answers = answers
        self._pairs = sorted(answers)
        self._pictures = pictures
        self._number = number
        self._changed = threading.Condition()
        self._url = ""  # of the server, where there is one
        self._kills = 0
        self._ended = False
        self._found = Found()
        self._pool = ThreadPoolExecutor(number)

    def __enter__(self) -> "Clients":
        self._running = [self._pool.submit(self._run, random.Random(seed)) for seed in range(self._number)]
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for one in self._running:
            one.result()
        self._pool.shutdown()

    def serve(self, url: str) -> None:
        """There is a server at `url` from now on."""
        with self._changed:
            self._url = url
            self._changed.notify_all()

    def wait_for_an_answer(self, timeout_s: float) -> None:
        """Since the last `take`; or for that long."""
        with self._changed:
            self._changed.wait_for(lambda: self._found.requests, timeout_s)

    def down(self) -> None:
        """The server is about to be killed: what is under way is excused."""
        with self._changed:
            self._url = ""
            self._kills += 1

    def take(self) -> Found:
        """What was seen since the last call."""
        with self._changed:
            found, self._found = self._found, Found()
        return found

    def _run(self, chance: random.Random) -> None:
        pair = chance.choice(self._pairs)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._url)
                url, kills = self._url, self._kills
                if self._ended:
                    return
            start = time.monotonic()
            try:
                answer = asked(url, self._pictures, pair).answer
            except Exception as error:  # whatever it is: the request failed, the others go on
                self._note_failure(f"{type(error).__name__}: {error}"[:500], kills)
                time.sleep(PAUSE_S)
            else:
                self._note(pair, answer, time.monotonic() - start)
                pair = chance.choice(self._pairs)

    def _note_failure(self, error: str, kills: int) -> None:
        with self._changed:
            if kills != self._kills:
                self._found.excused += 1
            else:
                self._found.failed += 1
                self._found.errors = [*self._found.errors, error][:NUM_ERRORS]

    def _note(self, pair: Pair, answer: Answer, seconds: float) -> None:
        apart = difference(self._answers[pair], answer)
        with self._changed:
            found = self._found
            found.requests += 1
            found.slowest_s = max(found.slowest_s, seconds)
            if apart <= TOLERANCE:
                found.largest_difference = max(found.largest_difference, apart)
            else:
                found.wrong += 1
                error = f"picture {pair[0]}, question {pair[1]}: {apart:.1e} apart"
                found.errors = [*found.errors, error][:NUM_ERRORS]
            self._changed.notify_all()
