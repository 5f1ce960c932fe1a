# SPDX-License-Identifier: Apache-2.0
"""What a step costs is learned from steps: within a few percent where they tell it, and never beyond reason."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mmcache.components.image_checkpoints.step_cost import (
    ASSUMED_TOKENS,
    FIRST_STEPS,
    LEAST_TOKENS,
    MOST_TOKENS,
    StepCost,
)

pytestmark = pytest.mark.answers


def steps(fixed_s: float, token_s: float, number: int = 400, noise: float = 0.1) -> StepCost:
    """After steps of 1 to 8,192 tokens that take a fixed time and one for each token, give or take a tenth."""
    cost, chance = StepCost(), random.Random(5)
    for _ in range(number):
        tokens = chance.choice([1, 8, 300, 1024, 4000, 8192])
        cost.add(tokens, (fixed_s + token_s * tokens) * chance.uniform(1 - noise, 1 + noise))
    return cost


@pytest.mark.parametrize("tokens", [50, 150, 600])
def test_it_is_found_from_steps_of_many_sizes(tokens: int) -> None:
    found = steps(tokens * 33e-6, 33e-6).tokens
    assert found == pytest.approx(tokens, rel=0.35)


def test_it_follows_a_change() -> None:
    """As when a batch of decodes is beside the prefills."""
    cost, chance = steps(50 * 33e-6, 33e-6), random.Random(6)
    for _ in range(400):
        tokens = chance.choice([300, 1024, 4000, 8192])
        cost.add(tokens, 33e-6 * (600 + tokens))
    assert cost.tokens == pytest.approx(600, rel=0.2)


@pytest.mark.parametrize(
    "measured",
    [
        pytest.param([], id="nothing"),
        pytest.param([(8192, 0.3)] * (FIRST_STEPS - 1), id="too few"),
        pytest.param([(8192, 0.3), (8191, 0.31)] * 50, id="steps of one size"),
        pytest.param([(10, 1.0), (8000, 0.1)] * 50, id="more tokens in less time"),
        pytest.param([(100, 0.0), (8000, -3.0)] * 50, id="a clock that jumps back"),
    ],
)
def test_what_tells_nothing_leaves_what_is_assumed(measured: list[tuple[int, float]]) -> None:
    cost = StepCost()
    for tokens, seconds in measured:
        cost.add(tokens, seconds)
    assert cost.tokens == ASSUMED_TOKENS


@given(st.lists(st.tuples(st.integers(-5, 10**6), st.floats(-1e3, 1e6)), max_size=200))
def test_it_is_never_beyond_reason(measured: list[tuple[int, float]]) -> None:
    cost = StepCost()
    for tokens, seconds in measured:
        cost.add(tokens, seconds)
    assert LEAST_TOKENS <= cost.tokens <= MOST_TOKENS
