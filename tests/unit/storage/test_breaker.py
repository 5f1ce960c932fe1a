# SPDX-License-Identifier: Apache-2.0
"""Circuit breakers: how long they are open, and what the log says."""

import threading

import pytest

from tests.support.storage_contract import Clock
from vllm_mmcache.storage import breaker as module
from vllm_mmcache.storage.breaker import CircuitBreaker


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_open_after_a_failure_and_closed_after_a_success(clock: Clock, log: pytest.LogCaptureFixture) -> None:
    log.set_level("INFO", "vllm.mmcache")
    one = CircuitBreaker("a disk", 10, 25)
    assert not one.is_open()
    one.record_success()
    assert not log.messages
    for rest_s in (10, 20, 25, 25):  # doubled, up to the longest
        one.record_failure(OSError("full"))
        assert one.is_open()
        clock.ahead_s += rest_s - 1
        assert one.is_open()
        clock.ahead_s += 2
        assert not one.is_open()
    one.record_success()
    one.record_success()
    assert log.messages == [
        "mmcache a disk is off, and is tried again after 10 s, later up to 25 s: full. Serving goes on without it.",
        "mmcache a disk works again",
    ]
    one.record_failure(OSError("full"))
    clock.ahead_s += 11  # anew
    assert not one.is_open()
    assert len(log.messages) == 3


def test_what_began_before_the_failure_does_not_close_it(clock: Clock) -> None:
    one = CircuitBreaker("a disk", 10, 20)
    one.record_failure("late")
    one.record_success()
    assert one.is_open()


def test_threads_that_fail_at_once_count_as_one(clock: Clock, log: pytest.LogCaptureFixture) -> None:
    one = CircuitBreaker("a disk", 10, 1000)
    barrier = threading.Barrier(8)

    def fail() -> None:
        barrier.wait()
        one.record_failure("together")

    threads = [threading.Thread(target=fail) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    clock.ahead_s += 11
    assert not one.is_open()
    assert len(log.messages) == 1
