# SPDX-License-Identifier: Apache-2.0
"""How far two answers to one prompt are apart, as a share of the probability, and how far they may be. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

FLOOR_FLOAT32 = 1e-4
FLOOR = 1e-2
"""Of what computes in 16 bits, or keeps a KV cache of less: what answers may differ by where cold runs happen to be
equal. A wrong picture or state moves more."""
TIMES_COLD = 4.0
"""So many times as far as two cold runs are apart may a warm one be from a cold one: two show little of how far they
can be."""

Logprobs = Mapping[int, float]
"""Token -> log-probability, of the best tokens."""


class Answered(Protocol):
    """An answer: its tokens, and for each the log-probabilities of the best ones."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens that were chosen."""

    @property
    def logprobs(self) -> Sequence[Logprobs]:
        """Those of each step."""


def between_steps(one: Logprobs, other: Logprobs) -> float:
    """The probability mass that lies elsewhere: half the sum of |p - q| over the best tokens of both, from 0 to 1.

    A token that is not among the other's best has there at most the least probability of these, so up to that much is
    no difference. What is not a number is as far away as can be.
    """
    if not one or not other:
        return 1.0
    p = {token: math.exp(logprob) for token, logprob in one.items()}
    q = {token: math.exp(logprob) for token, logprob in other.items()}
    least_p, least_q = min(p.values()), min(q.values())
    total = 0.0
    for token in p.keys() | q.keys():
        mine, its = p.get(token), q.get(token)
        if mine is None:
            mine = min(least_p, its or 0.0)
        if its is None:
            its = min(least_q, mine)
        total += abs(mine - its)
    return min(1.0, total / 2) if math.isfinite(total) else 1.0


def between(one: Answered, other: Answered) -> float:
    """The largest distance between two answers in one step, from 0 to 1.

    After a step in which other tokens were chosen, the answers go on from different texts, and nothing is compared.
    """
    worst = 0.0
    for step, (first, second) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
        worst = max(worst, between_steps(first, second))
        if one.token_ids[step] != other.token_ids[step]:
            break
    return worst


def floor_of(dtype: str, has_smaller_kv: bool) -> float:
    """What two right answers may differ by on any engine. dtype: torch's name, such as float32."""
    return FLOOR_FLOAT32 if dtype == "float32" and not has_smaller_kv else FLOOR


def bound_of(floor: float, between_cold: float) -> float:
    """What a warm answer may differ by from a cold one, where two cold ones differ by `between_cold`."""
    return max(floor, TIMES_COLD * between_cold)
