# SPDX-License-Identifier: Apache-2.0
"""An answer that is further from others than it may be is an error."""

import math
from dataclasses import replace

import pytest

from vllm_mmcache.exactness.answers import Answer, Inexact, assert_near


def answer(likely: float) -> Answer:
    """One step of two tokens; the first has this probability."""
    step = {1: math.log(likely), 2: math.log(1 - likely)}
    return Answer("what?", (), (5, 6), (1,), (step,), 0, "text")


def test_the_nearest_one_counts() -> None:
    others = [answer(0.6), answer(0.79)]
    assert assert_near(answer(0.8), others, 0.02, "others") == pytest.approx(0.01)


def test_too_far_from_all_is_inexact() -> None:
    with pytest.raises(Inexact, match=r"the answer is 0\.1 from its own cold runs, and 0\.05 is allowed"):
        assert_near(answer(0.8), [answer(0.6), answer(0.7)], 0.05, "its own cold runs")


def test_answers_to_other_prompts_are_not_compared() -> None:
    with pytest.raises(AssertionError, match="other tokens than in stock"):
        assert_near(answer(0.8), [replace(answer(0.8), prompt_ids=(5, 7))], 1.0, "stock")
