# SPDX-License-Identifier: Apache-2.0
"""Circuit breakers: how long what fails is left alone, and what the log says of it."""

from types import SimpleNamespace

import pytest

from vllm_mmcache.storage import breaker
from vllm_mmcache.storage.breaker import CircuitBreaker


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as breakers see it."""
    seconds = [1000.0]
    monkeypatch.setattr(breaker, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def open_for(one: CircuitBreaker, now: list[float]) -> float:
    """Seconds until it is closed, which then have passed."""
    start = now[0]
    while one.is_open():
        now[0] += 0.5
    return now[0] - start


def test_each_further_failure_opens_it_for_longer(now: list[float], log: pytest.LogCaptureFixture) -> None:
    log.set_level("INFO")
    one = CircuitBreaker("the store", 5, 30)
    assert not one.is_open()
    opened_s = []
    for number in range(5):
        one.record_failure(f"error {number}")
        opened_s.append(open_for(one, now))
    assert opened_s == [5, 10, 20, 30, 30]
    one.record_success()
    one.record_success()
    one.record_failure("another")
    assert open_for(one, now) == 5
    assert [message.split(",")[0] for message in log.messages] == [
        "mmcache the store is off",
        "mmcache the store works again",
        "mmcache the store is off",
    ]
    assert "error 0. Serving goes on" in log.messages[0]
    assert "after 5 s, later up to 30 s" in log.messages[0]


def test_several_that_fail_at_once_are_one_failure(now: list[float], log: pytest.LogCaptureFixture) -> None:
    one = CircuitBreaker("the store", 5, 30)
    for _ in range(10):
        one.record_failure("error")
    assert open_for(one, now) == 5
    assert len(log.messages) == 1


def test_a_success_that_comes_late_does_not_close_it(now: list[float], log: pytest.LogCaptureFixture) -> None:
    """It began before the failure."""
    log.set_level("INFO")
    one = CircuitBreaker("the store", 5, 30)
    one.record_success()
    one.record_failure("error")
    one.record_success()
    assert one.is_open()
    assert len(log.messages) == 1
    assert open_for(one, now) == 5
    one.record_success()
    assert len(log.messages) == 2
