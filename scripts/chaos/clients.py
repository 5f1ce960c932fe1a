# SPDX-License-Identifier: Apache-2.0
"""The clients of the chaos run: they ask about pictures, and know each answer beforehand.

An answer is compared token by token, with the log-probability of each. A request that was under way while the server
was killed is excused, and asked again of the next one; every other one has to be answered, and rightly.
"""

import json
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, product
from threading import Lock
from typing import Any

from benchmarks.pictures import Kind
from benchmarks.servers import Reply, ask, image_part, request

PICTURE = Kind("image/png", (256, 256), 20, {"format": "PNG"})
QUESTIONS = ("What is this?", "Name the colours, from left to right.")
MORE = {"max_tokens": 8, "ignore_eos": True, "logprobs": True}
TIMEOUT_S = 60.0
PAUSE_S = 0.5  # after a failure
TOLERANCE = 1e-5  # of a log-probability, which is a float32 near 1
NEAR_TIE = 1e-2  # two tokens so close may change places where the batch is another
NUM_ERRORS = 5  # kept of a phase

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


def cold_answers(url: str, pictures: Sequence[str]) -> dict[Pair, Answer]:
    """The answer of a server to each pair, asked one at a time; without near ties."""
    pairs = product(range(len(pictures)), range(len(QUESTIONS)))
    replies = {pair: asked(url, pictures, pair, top_logprobs=2) for pair in pairs}
    return {pair: reply.answer for pair, reply in replies.items() if reply.margin > NEAR_TIE}


class Clients:
    """So many threads that ask a server, again and again, until it is killed or the block ends."""

    def __init__(
        self, url: str, answers: Mapping[Pair, Answer], pictures: Sequence[str], number: int, first: Iterable[Pair] = ()
    ) -> None:
        """`first` is asked before all else."""
        self.found = {"requests": 0, "wrong": 0, "failed": 0, "excused": 0, "slowest_s": 0.0}
        """How many were answered, of these how many wrongly, and how many were not."""
        self.errors: list[str] = []
        self.excused: list[Pair] = []
        self.is_killed = False
        """Said before it is: what is under way is excused."""
        self._url, self._answers, self._pictures, self._number = url, answers, pictures, number
        self._first = list(first)
        self._has_ended = False
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(number)

    def __enter__(self) -> "Clients":
        """Returns when one has been answered."""
        self._running = [self._pool.submit(self._run) for _ in range(self._number)]
        self._wait(0)
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended = True
        for one in self._running:
            one.result()
        self._pool.shutdown()

    def wait(self) -> None:
        """For one more that is answered, or fails."""
        self._wait(self._num_ended)

    @property
    def _num_ended(self) -> int:
        return int(self.found["requests"] + self.found["failed"])

    def _wait(self, before: int) -> None:
        while self._num_ended == before:
            time.sleep(0.05)

    def _run(self) -> None:
        pairs = sorted(self._answers)
        while not (self._has_ended or self.is_killed):
            with self._lock:
                pair = self._first.pop() if self._first else random.choice(pairs)
            start = time.monotonic()
            try:
                answer = asked(self._url, self._pictures, pair).answer
            except Exception as error:  # whatever it is: the request failed, the others go on
                if self.is_killed:
                    self.excused.append(pair)
                    self._count("excused")
                else:
                    self._count("failed", f"{type(error).__name__}: {error}"[:500])
                    time.sleep(PAUSE_S)
                continue
            self._count("requests", seconds=time.monotonic() - start)
            if (apart := difference(self._answers[pair], answer)) > TOLERANCE:
                self._count("wrong", f"picture {pair[0]}, question {pair[1]}: {apart:.1e} apart")

    def _count(self, what: str, error: str = "", seconds: float = 0.0) -> None:
        with self._lock:
            self.found[what] += 1
            self.found["slowest_s"] = max(self.found["slowest_s"], round(seconds, 2))
            if error and len(self.errors) < NUM_ERRORS:
                self.errors.append(error)
