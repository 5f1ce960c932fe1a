# SPDX-License-Identifier: Apache-2.0
"""How a server reads from the place of files, or writes to it: with a bounded wait. API server process, any thread.

A place that hangs blocks only threads of its own. Whoever waits for it is told after a bounded time that it does not
serve. If that counts as a failure, the place is then left alone for a while, as after any other failure.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

from vllm_mmcache.base.errors import FilesUnusable
from vllm_mmcache.base.store_url import error_without_secrets
from vllm_mmcache.base.worker_threads import Threads
from vllm_mmcache.storage.breaker import CircuitBreaker

T = TypeVar("T")

REST_S = 5.0, 60.0
"""Seconds that a place is left alone after a first failure, and at most, since each further failure doubles them."""
THREADS = 16
MOST_WAITING = 1 << 14  # calls: 16 requests that name as many files as one may
POLL_S = 2.0
"""How often a call that waits for its turn looks whether all threads hang."""
_ALL_HANG = "all threads wait for it"
UNREACHABLE = "files can't be reached now: ask again later"


class _Call(Generic[T]):
    """What a thread of the place is to do, and what came of it. longest_s: seconds that it may take."""

    def __init__(self, call: Callable[[], T], longest_s: float) -> None:
        self.future: Future[T] = Future()
        self.begun: float | None = None
        self.longest_s = longest_s
        self._call: Callable[[], T] | None = call

    def run(self) -> None:
        """Do it, unless nobody waits for it any more."""
        call = self._call
        if not self.future.set_running_or_notify_cancel() or call is None:
            return
        self.begun = time.monotonic()
        try:
            self.future.set_result(call())
        except BaseException as error:
            self.future.set_exception(error)

    def give_up(self) -> None:
        """Nobody waits for it any more: what it holds goes if it has not begun."""
        if self.future.cancel():
            self._call = None

    @property
    def next_look_s(self) -> float:
        """Seconds until whoever waits for it has to look again whether it is late, or has begun."""
        if self.begun is None:
            return min(POLL_S, self.longest_s)
        return max(0.0, self.begun + self.longest_s - time.monotonic())

    @property
    def is_late(self) -> bool:
        """Whether it takes longer than it may; what it waited for its turn does not count."""
        return self.begun is not None and time.monotonic() >= self.begun + self.longest_s


class Access:
    """One kind of access to a place, such as "reading", which fails and rests by itself, with threads of its own.

    wait_s: seconds that a call may take which is given no time of its own. A call of that kind that is late counts as a
    failure of the place; so does it when the calls of all threads are late, whatever time they were given.
    """

    def __init__(self, name: str, wait_s: float) -> None:
        self.place = ""
        """Its URL, whose secrets are taken out of what the log says."""
        self._breaker = CircuitBreaker(f"with the files of clients, {name}", *REST_S)
        self._threads = Threads(f"files-{name}", THREADS, MOST_WAITING, wait_s, is_background=False)
        self._wait_s = wait_s

    @contextlib.contextmanager
    def serving(self, *expected: type[Exception]) -> Iterator[None]:
        """The place is used in this block: what it raises becomes FilesUnusable, and it is left alone for a while.

        expected: errors that are not the place's, and stay what they are.
        """
        if self._breaker.is_open():
            raise FilesUnusable(UNREACHABLE)
        try:
            yield
        except expected:
            raise
        except Exception as error:
            said = error_without_secrets(error, self.place) if self.place else str(error)
            self._breaker.record_failure(f"{type(error).__name__}: {said}")
            raise FilesUnusable(UNREACHABLE) from error
        self._breaker.record_success()

    def wait_for(self, call: Callable[..., T], *args: Any) -> T:
        """The result of `call`, run in a thread of the place. Raises: FilesUnusable if it is late; as the call."""
        running = self._begin(partial(call, *args), self._wait_s)
        while not futures.wait([running.future], running.next_look_s).done:
            self._check(running, late_is_failure=True)
        return running.future.result()

    async def wait_for_async(self, call: Callable[..., T], *args: Any, longest_s: float | None = None) -> T:
        """As `wait_for`, in the event loop.

        longest_s: seconds, in the place of wait_s, for a call whose time grows with the number of a tenant's files or
        with the size of one. If it is late, only this call fails.
        """
        running = self._begin(partial(call, *args), self._wait_s if longest_s is None else longest_s)
        waiting = asyncio.wrap_future(running.future)
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio logs it
        try:
            while not (await asyncio.wait([waiting], timeout=running.next_look_s))[0]:
                self._check(running, late_is_failure=longest_s is None)
            return waiting.result()
        finally:
            waiting.cancel()
            running.give_up()

    def _begin(self, call: Callable[[], T], longest_s: float) -> _Call[T]:
        running = _Call(call, longest_s)
        if not self._breaker.is_open() and self._threads.submit(running.run, longest_s):
            return running
        if self._threads.are_stuck():
            self._breaker.record_failure(_ALL_HANG)
        raise FilesUnusable(UNREACHABLE)

    def _check(self, running: _Call[T], *, late_is_failure: bool) -> None:
        """Raises: FilesUnusable where a call is late, or the place is to be left alone."""
        is_late = running.is_late
        if is_late and late_is_failure:
            self._breaker.record_failure(f"no answer within {self._wait_s:g} s")
        elif self._threads.are_stuck():
            self._breaker.record_failure(_ALL_HANG)
        if is_late or self._breaker.is_open():
            running.give_up()
            raise FilesUnusable(UNREACHABLE)
