# SPDX-License-Identifier: Apache-2.0
"""Threads that read for others: what waits is bounded, and one that hangs holds up nobody else."""

import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from tests.support.refusals import no_threads
from tests.support.tiers import LONG_S
from vllm_mmcache.base.worker_threads import Threads


class Gate:
    """Jobs that hang until it is opened, and say when they have begun."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self._opened = threading.Event()

    def job(self) -> None:
        self.begun.release()
        self._opened.wait(LONG_S)

    def wait(self, count: int) -> None:
        """Until so many more have begun."""
        for _ in range(count):
            assert self.begun.acquire(timeout=LONG_S)

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


def signal() -> tuple[threading.Event, Callable[[], None]]:
    done = threading.Event()
    return done, done.set


def threads_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"mmcache-{name}-")]


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LONG_S
    while not (is_met := condition()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return is_met


def test_no_more_wait_than_may(gate: Gate) -> None:
    threads = Threads("bounded", 2, most_waiting=3)
    assert [threads.submit(gate.job) for _ in range(2)] == [True] * 2
    gate.wait(2)
    assert [threads.submit(gate.job) for _ in range(5)] == [True] * 3 + [False] * 2
    gate.open()
    gate.wait(3)
    done, job = signal()
    assert until(lambda: threads.submit(job))  # there is room again
    assert done.wait(LONG_S)
    assert not gate.begun.acquire(blocking=False)  # what was refused is forgotten


def test_threads_start_when_they_are_needed(gate: Gate) -> None:
    threads = Threads("started", 3)
    assert not threads_of("started")
    for number in range(1, 6):
        assert threads.submit(gate.job)
        assert len(threads_of("started")) == min(number, 3)
    gate.wait(3)
    gate.open()
    gate.wait(2)
    assert all(thread.daemon for thread in threads_of("started"))
    threads.close()
    assert until(lambda: not threads_of("started"))


def test_one_that_hangs_leaves_the_others(gate: Gate) -> None:
    threads = Threads("hangs", 2, stuck_s=0)
    assert threads.submit(gate.job)
    gate.wait(1)
    for _ in range(5):  # and it is not all of them
        done, job = signal()
        assert until(lambda job=job: threads.submit(job))  # type: ignore[misc]  # the last one may be just ending
        assert done.wait(LONG_S)


@pytest.mark.parametrize("stuck_s", [0.0, 1000.0])
def test_where_all_hang_no_more_are_taken(gate: Gate, stuck_s: float) -> None:
    """The control: threads that only work take more."""
    threads = Threads("stuck", 2, stuck_s=stuck_s)
    for _ in range(2):
        assert threads.submit(gate.job)
    gate.wait(2)
    time.sleep(0.001)
    done, job = signal()
    assert threads.submit(job) == (stuck_s > 0)
    gate.open()
    assert until(lambda: threads.submit(job))  # what hung has come back
    assert done.wait(LONG_S)


def test_a_job_that_raises_ends_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    threads = Threads("raises", 1)
    for _ in range(3):
        assert threads.submit(broken)
    done, job = signal()
    assert threads.submit(job)
    assert done.wait(LONG_S)
    assert len(threads_of("raises")) == 1
    assert [record.message for record in caplog.records if record.name == "vllm.mmcache"] == [
        "mmcache: a job of raises failed; serving goes on without it"
    ] * 3


def test_closing_forgets_what_waits(gate: Gate) -> None:
    threads = Threads("closed", 1)
    assert threads.submit(gate.job)
    gate.wait(1)
    forgotten, job = signal()
    assert threads.submit(job)
    threads.close()
    assert not threads.submit(job)
    gate.open()
    assert until(lambda: not threads_of("closed"))  # it ends after what it does now
    assert not forgotten.is_set()


def test_what_a_job_holds_goes_with_it() -> None:
    class Held:
        pass

    held = Held()
    alive, (done, end) = weakref.ref(held), signal()
    threads = Threads("holds", 1)
    assert threads.submit(lambda held=held: end())  # type: ignore[misc]
    del held
    assert done.wait(LONG_S)
    assert until(lambda: alive() is None)


def test_no_thread_to_be_had() -> None:
    """Later there are threads again."""
    threads = Threads("refused", 1)
    done, job = signal()
    with no_threads():
        assert not threads.submit(job)
    assert threads.submit(lambda: None)
    assert threads.submit(job)
    assert done.wait(LONG_S)
