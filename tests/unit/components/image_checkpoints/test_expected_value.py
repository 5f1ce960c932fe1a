# SPDX-License-Identifier: Apache-2.0
"""Whether checkpoints are expected to pay, by counts: unique pictures, phases that switch, tenants without end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mmcache.components.image_checkpoints.expected_value import (
    FORGOTTEN_AFTER,
    MOST_IMAGES,
    MOST_TENANTS,
    Prefill,
    ReuseRates,
    pays,
)
from vllm_mmcache.components.image_checkpoints.positions import END, START, Checkpoint

pytestmark = pytest.mark.answers

STEP_TOKENS = 150
END_OF_IMAGE = Checkpoint(1600, frozenset({END}), ending_image=0)
START_OF_IMAGE = Checkpoint(160, frozenset({START}))
INNER_END = Checkpoint(800, frozenset({END}), is_likely=False, ending_image=0)


def is_made(rates: ReuseRates, checkpoint: Checkpoint = END_OF_IMAGE, salt: str = "", image: str = "new") -> bool:
    return pays(rates.expected(checkpoint, salt, image), checkpoint.tokens, cost_tokens=STEP_TOKENS)


def phase(rates: ReuseRates, requests: int, every: int = 0, salt: str = "") -> list[bool]:
    """Whether each of so many requests makes one; each `every`-th could have resumed at one, or did."""
    found = []
    for number in range(requests):
        reused = END_OF_IMAGE if every and number % every == every - 1 else None
        rates.record(salt, [] if reused else [END_OF_IMAGE], reused, "an image")
        found.append(is_made(rates, salt=salt))
    return found


def test_unique_pictures_are_given_up_for_good() -> None:
    found = phase(ReuseRates(), 200)
    assert 20 <= sum(found) <= FORGOTTEN_AFTER, "twenty images may be asked about before the first second question"
    assert not any(found[FORGOTTEN_AFTER:])


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_phases_switch_within_40_requests_in_both_directions(every: int) -> None:
    rates = ReuseRates()
    assert not any(phase(rates, 300)[-100:])
    assert all(phase(rates, 300, every)[40:]), "reused again"
    assert not any(phase(rates, 300)[40:]), "and not"
    assert all(phase(rates, 300, every)[40:])


def test_what_was_not_reused_for_long_is_not_expected_whatever_it_saves() -> None:
    rates = ReuseRates()
    phase(rates, 40, every=2)
    phase(rates, FORGOTTEN_AFTER - 1)
    assert rates.expected(END_OF_IMAGE, "", "new") > 0, "the control"
    phase(rates, 1)
    assert rates.expected(END_OF_IMAGE, "", "new") == 0
    phase(rates, 1, every=1)
    assert rates.expected(END_OF_IMAGE, "", "new") > 0, "and one reuse is enough"


def test_what_saves_much_is_made_for_a_rare_reuse() -> None:
    """The share at which it is given up is the one at which it costs what it saves."""
    assert pays(0.01, saved_tokens=100 * STEP_TOKENS, cost_tokens=STEP_TOKENS)
    assert not pays(0.01, saved_tokens=99 * STEP_TOKENS, cost_tokens=STEP_TOKENS)
    assert not pays(0.01, saved_tokens=100 * STEP_TOKENS, cost_tokens=2 * STEP_TOKENS)


@given(st.floats(0, 1), st.integers(0, 10**6), st.integers(0, 1000))
def test_what_costs_more_never_pays_more(rate: float, saved: int, cost: int) -> None:
    assert pays(rate, saved, 0)
    assert pays(rate, saved, cost) >= pays(rate, saved, cost + 1)
    assert pays(rate, saved, cost) <= pays(rate, saved + 1, cost)


def test_tenants_are_judged_apart() -> None:
    rates = ReuseRates()
    for _ in range(100):
        phase(rates, 2, every=2, salt="reuses")
        phase(rates, 2, salt="never")
    assert is_made(rates, salt="reuses")
    assert not is_made(rates, salt="never")
    rate = rates.expected(END_OF_IMAGE, "", "")
    assert is_made(rates, salt="unknown") == pays(rate, END_OF_IMAGE.tokens, STEP_TOKENS)


def test_an_image_that_was_reused_has_its_own_rate_and_loses_it() -> None:
    rates = ReuseRates()
    rates.record("", [], END_OF_IMAGE, "popular")
    phase(rates, 200)
    assert is_made(rates, image="popular")
    assert not is_made(rates, image="another"), "the control"
    for _ in range(FORGOTTEN_AFTER):
        rates.made(END_OF_IMAGE, "", "popular")
    assert not is_made(rates, image="popular")


def test_starts_and_ends_and_inner_ones_are_judged_apart() -> None:
    rates = ReuseRates()
    assert not is_made(rates, INNER_END), "not tried"
    for _ in range(100):
        rates.record("", [END_OF_IMAGE], START_OF_IMAGE)
    assert rates.expected(START_OF_IMAGE, "") > 0.99
    assert rates.expected(END_OF_IMAGE, "") == 0
    for _ in range(20):
        rates.record("", [], INNER_END)
    assert is_made(rates, INNER_END), "one would have been used"
    assert not is_made(rates)


def test_tenants_and_images_without_end_take_bounded_room() -> None:
    rates = ReuseRates()
    for number in range(30_000):
        rates.record(f"tenant {number}", [], END_OF_IMAGE, f"image {number}")
    assert len(rates) <= MOST_TENANTS + MOST_IMAGES


IMAGES = [(100, 900), (1100, 900), (2100, 900), (3100, 900)]


@pytest.mark.parametrize(
    ("end", "budget", "stops", "more", "steps"),
    [
        (4060, 8192, [4048], 3968, 1),  # a chunk more
        (4060, 8192, [4048], 4048, 0),  # a chunk ends there anyway
        (4000, 2048, [], 2064, 1),  # behind the end of the first chunk
        (4000, 2048, [], 2000, 0),  # the first chunk ends earlier, and the second takes what it leaves
        (3000, 2048, [], 1056, 1),  # as many chunks, but the second image goes with the third now
        (4060, 2048, [4048], 1056, 2),  # a chunk more, and other runs
    ],
)
def test_what_a_stop_costs(end: int, budget: int, stops: list[int], more: int, steps: int) -> None:
    images = [image for image in IMAGES if sum(image) <= end]
    assert Prefill(0, end, budget, images).extra_steps(stops, more) == steps


def test_runs_of_the_tower_are_those_of_chunks() -> None:
    prefill = Prefill(0, 4060, 2048, IMAGES)
    assert prefill.chunks([]) == [(0, 2048), (2048, 4060)]
    assert prefill.runs([]) == [[0, 1], [2, 3]]
    assert prefill.runs([3088]) == [[0, 1], [2], [3]]
    assert Prefill(2100, 4060, 2048, IMAGES).runs([]) == [[2, 3]]


@given(st.sets(st.integers(0, 4060), max_size=5), st.integers(0, 4060), st.integers(16, 5000))
def test_chunks_cover_a_prompt_and_every_image_runs_once(stops: set[int], more: int, budget: int) -> None:
    prefill = Prefill(32, 4060, budget, IMAGES)
    chunks = prefill.chunks(stops)
    assert [start for start, _ in chunks] == [32, *(end for _, end in chunks[:-1])]
    assert chunks[-1][1] == 4060
    assert all(end - start <= budget for start, end in chunks)
    assert [image for run in prefill.runs(stops) for image in run] == [0, 1, 2, 3]
    assert prefill.extra_steps(stops, more) >= 0
    assert prefill.extra_steps({*stops, more}, more) == 0
