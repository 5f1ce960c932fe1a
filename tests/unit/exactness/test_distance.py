# SPDX-License-Identifier: Apache-2.0
"""How far two answers are apart."""

import math
from dataclasses import dataclass

import pytest

from vllm_mmcache.exactness.distance import FLOOR, FLOOR_FLOAT32, between, between_steps, bound_of, floor_of


def logs(**probabilities: float) -> dict[int, float]:
    return {int(token[1:]): math.log(p) for token, p in probabilities.items()}


def test_distance_is_the_mass_that_lies_elsewhere() -> None:
    one = logs(t1=0.5, t2=0.3, t3=0.2)
    assert between_steps(one, one) == 0
    assert between_steps(one, logs(t1=0.3, t2=0.5, t3=0.2)) == pytest.approx(0.2)
    assert between_steps(logs(t1=0.99, t2=0.01), logs(t3=0.99, t4=0.01)) > 0.9


def test_what_is_not_among_the_best_may_be_just_below_them() -> None:
    """The twentieth and the twenty-first token may change places."""
    one, other = logs(t1=0.9, t2=0.01), logs(t1=0.9, t3=0.01)
    assert between_steps(one, other) == 0
    assert between_steps(one, logs(t1=0.9, t3=0.001)) == pytest.approx(0.0045)
    assert between_steps(one, other) == between_steps(other, one)


def test_improbable_tokens_weigh_nothing() -> None:
    one = {1: math.log(0.999), 2: -12.0}
    assert between_steps(one, {1: math.log(0.999), 2: -16.0}) < FLOOR_FLOAT32


@pytest.mark.parametrize("wrong", [{}, {1: math.nan}, {1: 800.0 - math.inf}])
def test_no_answer_is_far_away(wrong: dict[int, float]) -> None:
    assert between_steps(logs(t1=1.0), wrong) >= 0.5
    assert between_steps(wrong, logs(t1=1.0)) >= 0.5


def test_bounds() -> None:
    assert floor_of("float32", has_smaller_kv=False) == FLOOR_FLOAT32
    assert floor_of("float32", has_smaller_kv=True) == floor_of("bfloat16", has_smaller_kv=False) == FLOOR
    assert bound_of(FLOOR, 0.001) == FLOOR
    assert bound_of(FLOOR, 0.02) == pytest.approx(0.08)


@dataclass
class Answer:
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]


def test_the_worst_step_counts_until_the_texts_differ() -> None:
    sure, half = logs(t1=0.999, t2=0.001), logs(t1=0.5, t2=0.5)
    one = Answer((1, 1, 1), (sure, sure, sure))
    assert between(one, one) == 0
    assert between(one, Answer((1, 1, 1), (sure, half, sure))) == pytest.approx(0.499)
    assert between(one, Answer((1, 2, 1), (sure, half, sure))) == pytest.approx(0.499)
    assert between(one, Answer((2, 1, 1), (sure, half, half))) == 0, "behind another token nothing is compared"
