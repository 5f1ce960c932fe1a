# SPDX-License-Identifier: Apache-2.0
"""How far two answers to one prompt are apart, as a share of the probability, and how far they may be. Pure."""

from collections.abc import Mapping, Sequence
from math import exp
from typing import Protocol

FLOORS = {"torch.float32": 1e-4}
FLOOR = 1e-2
"""Of 16 bits: what answers may differ by where cold runs happen to be equal; a wrong picture or state moves more."""
FACTOR = 4.0
"""How much further than two cold runs from each other an answer may be: two runs show little of how far they can."""


class Answered(Protocol):
    """An answer: its tokens, and for each the log-probabilities of the most likely ones."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens that were chosen."""

    @property
    def logprobs(self) -> Sequence[Mapping[int, float]]:
        """Token -> log-probability, by step."""


def between(one: Answered, other: Answered) -> float:
    """The largest share of the probability, 0 to 1, that lies on other tokens in one step of two answers.

    After a step in which other tokens were chosen, the answers go on from different texts, and nothing is compared.
    """
    worst = 0.0
    for step, (first, second) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
        moved = sum(abs(_share(first, token) - _share(second, token)) for token in first.keys() | second.keys())
        worst = max(worst, moved / 2)
        if one.token_ids[step] != other.token_ids[step]:
            break
    return worst


def bound(noise: float, dtype: str) -> float:
    """How far an answer may be from a cold one, where two cold ones are `noise` apart. dtype: the model's."""
    return max(FLOORS.get(dtype, FLOOR), FACTOR * noise)


def _share(logprobs: Mapping[int, float], token: int) -> float:
    return exp(logprobs[token]) if token in logprobs else 0.0
