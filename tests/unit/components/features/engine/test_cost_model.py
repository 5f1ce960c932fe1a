# SPDX-License-Identifier: Apache-2.0
"""What was measured decides whether a tier is asked: never one that is known to be slower, but now and then."""

import time

import numpy as np
import pytest

from vllm_mmcache.base.estimate import NUM_BUCKETS, WEIGHT, Estimate
from vllm_mmcache.components.features.engine.cost_model import PROBE_EVERY_S, UNKNOWN_TOWER_S, CostModel, TierChoice
from vllm_mmcache.components.features.tiers import FEATURES
from vllm_mmcache.storage.tier_counts import TierCounts

MIB = 1024**2
SIZE = 64 * MIB
TOKENS = 2000


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def tower(num_tokens: int) -> float | None:
    """40 ms for the image of these tests."""
    return 0.04 * num_tokens / TOKENS


def costs_with(load_s: float, **options: object) -> tuple[CostModel, Clock]:
    clock = Clock()
    costs = CostModel(tower, None, clock=clock, **options)  # type: ignore[arg-type]
    costs.loaded("disk", SIZE, load_s)
    return costs, clock


def test_nothing_is_known_at_first() -> None:
    assert Estimate().seconds(100) is None
    assert Estimate().seconds(0) == 0


def test_a_question_while_the_first_load_is_told() -> None:
    """By another thread, which is as far as the time of the measurement: the tier counts as not measured yet."""
    asked: list[TierChoice] = []

    def clock() -> float:
        asked.append(costs.ask("disk", TOKENS, SIZE))
        return 0.0

    costs = CostModel(tower, None, clock=clock)
    costs.loaded("disk", SIZE, 1000.0)
    assert asked == [TierChoice.WAIT]


def test_an_estimate_is_linear_from_the_nearest_size() -> None:
    estimate = Estimate()
    estimate.add(1000, 1.0)
    estimate.add(100_000, 10.0)
    assert estimate.seconds(1000) == pytest.approx(1.0)
    assert estimate.seconds(2000) == pytest.approx(2.0)
    assert estimate.seconds(90_000) == pytest.approx(9.0)
    assert estimate.seconds(10**12) == pytest.approx(10**8)
    assert estimate.seconds(1) == pytest.approx(0.001)


def test_an_estimate_follows_what_is_measured() -> None:
    estimate = Estimate()
    estimate.add(1000, 1.0)
    estimate.add(1000, 2.0)
    assert estimate.seconds(1000) == pytest.approx(1 + WEIGHT)
    for _ in range(50):
        estimate.add(1000, 2.0)
    assert estimate.seconds(1000) == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize(("size", "seconds"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0), (1, np.nan), (1, np.inf)])
def test_what_can_be_no_measurement_is_left_out(size: int, seconds: float) -> None:
    estimate = Estimate()
    estimate.add(size, seconds)
    assert estimate.seconds(1) is None


def test_rubbish_in_shared_values_is_unknown() -> None:
    assert Estimate(np.full(NUM_BUCKETS, np.nan)).seconds(5) is None
    assert Estimate(np.full(NUM_BUCKETS, -1.0)).seconds(5) is None
    values = np.full(NUM_BUCKETS, np.inf)
    values[3] = 0.5
    assert Estimate(values).seconds(4) == pytest.approx(2.0)


@pytest.mark.parametrize("size", [1, 2, 3, 2**31, 2**32 - 1, 2**32, 2**60])
def test_every_size_has_a_place(size: int) -> None:
    estimate = Estimate()
    estimate.add(size, 3.0)
    assert estimate.seconds(size) == pytest.approx(3.0)
    assert np.count_nonzero(estimate.values) == 1


def test_waits_while_something_is_unknown() -> None:
    counters = TierCounts(FEATURES, "disk")
    costs = CostModel(tower, None, [counters])
    assert costs.ask("disk", TOKENS, SIZE) is TierChoice.WAIT
    blind = CostModel(lambda _: None, None, [counters])
    blind.loaded("disk", SIZE, 100.0)
    assert blind.ask("disk", TOKENS, SIZE) is TierChoice.WAIT
    assert counters.snapshot()["expected_load_s"] == counters.snapshot()["not_asked"] == 0


@pytest.mark.parametrize(
    ("load_s", "ask"),
    [(0.01, TierChoice.WAIT), (0.04, TierChoice.WAIT), (0.041, TierChoice.SKIP), (5.0, TierChoice.SKIP)],
)
def test_the_faster_one_is_taken(load_s: float, ask: TierChoice) -> None:
    costs, _ = costs_with(load_s)
    assert costs.ask("disk", TOKENS, SIZE) is ask
    assert costs.ask("remote", TOKENS, SIZE) is TierChoice.WAIT, "nothing is known of the other tier"


def test_a_slow_tier_is_probed_now_and_then() -> None:
    costs, clock = costs_with(1.0)
    asked = []
    for _ in range(100):
        asked.append(costs.ask("disk", TOKENS, SIZE))
        clock.now += 1
    assert asked.count(TierChoice.PROBE) == 100 // PROBE_EVERY_S
    assert asked.index(TierChoice.PROBE) == PROBE_EVERY_S, "it was measured just before"
    assert TierChoice.WAIT not in asked


def test_probes_bring_a_tier_back() -> None:
    costs, clock = costs_with(0.1)
    for _ in range(20):
        clock.now += PROBE_EVERY_S
        if costs.ask("disk", TOKENS, SIZE) is TierChoice.WAIT:
            break
        costs.loaded("disk", SIZE, 0.02)
    assert costs.ask("disk", TOKENS, SIZE) is TierChoice.WAIT
    costs.loaded("disk", SIZE, 10.0)
    assert costs.ask("disk", TOKENS, SIZE) is TierChoice.SKIP


def test_an_operator_who_waits_is_obeyed() -> None:
    counters = TierCounts(FEATURES, "disk")
    costs = CostModel(tower, 3.0, [counters])
    costs.loaded("disk", SIZE, 1.0)
    assert [costs.ask("disk", TOKENS, SIZE) for _ in range(3)] == [TierChoice.WAIT] * 3
    assert costs.max_wait_s(TOKENS) == 3.0
    assert CostModel(tower, 0.0).max_wait_s(TOKENS) == 0.0
    assert counters.snapshot()["not_asked"] == 0


def test_patience_is_the_towers_time() -> None:
    assert CostModel(tower, None).max_wait_s(3 * TOKENS) == pytest.approx(0.12)
    assert CostModel(lambda _: None, None).max_wait_s(TOKENS) == UNKNOWN_TOWER_S


def test_decisions_are_counted() -> None:
    counters = TierCounts(FEATURES, "disk")
    costs, clock = costs_with(0.1, counts=[counters])
    for _ in range(3):
        costs.ask("disk", TOKENS, SIZE)
    clock.now += PROBE_EVERY_S
    assert costs.ask("disk", TOKENS, SIZE) is TierChoice.PROBE
    counts = counters.snapshot()
    assert counts["not_asked"] == 3
    assert counts["expected_load_s"] == pytest.approx(0.4)
    assert counts["expected_tower_s"] == pytest.approx(0.16)


@pytest.mark.parametrize(("patience_s", "expected"), [(None, [10, 20, 30]), (7.0, [7, 7, 7])])
def test_several_images_of_a_request_are_waited_for_as_long_as_the_tower_takes_for_all(
    patience_s: float | None, expected: list[float]
) -> None:
    """Or as long as the operator says, for each of them."""
    costs, now = CostModel(lambda num_tokens: num_tokens / 10, patience_s), time.monotonic()
    until = [0.0]
    for _ in range(3):
        until.append(costs.wait_until(until[-1], 100))
    assert [round(one - now) for one in until[1:]] == expected
