# SPDX-License-Identifier: Apache-2.0
"""How a server reads from the place of files, or writes to it: with a bounded wait. API server process, any thread.

A place that is slow or hangs keeps the threads of its own and nobody else's: who waits for one of its calls is told
after a while that the place does not serve. Then it is left alone, as after any other failure.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

from vllm_mmcache.base.errors import FilesUnusable
from vllm_mmcache.base.store_url import error_without_secrets
from vllm_mmcache.base.worker_threads import Threads
from vllm_mmcache.storage.breaker import CircuitBreaker

T = TypeVar("T")

REST_S = 5.0, 60.0
"""That a place which fails is left alone, and the most, since each further failure doubles it."""
THREADS = 16
MOST_WAITING = 1 << 14  # calls: 16 requests that name as many files as one may
POLL_S = 2.0
"""How often a call that has not begun looks whether it ever will."""
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
    def left_s(self) -> float:
        """Seconds until it is late, or until it is time to look whether it has begun."""
        if self.begun is None:
            return min(POLL_S, self.longest_s)
        return max(0.0, self.begun + self.longest_s - time.monotonic())

    @property
    def is_late(self) -> bool:
        """Whether it takes longer than it may; what it waited for its turn does not count."""
        return self.begun is not None and self.left_s == 0


class Access:
    """One of the two things that a place does: "reading" or "writing". The other one goes on when this one fails.

    wait_s: seconds that one call may take. Then the place counts as one that fails; as it does where all threads wait
    for it in vain, however long their calls may take.
    """

    def __init__(self, name: str, wait_s: float) -> None:
        self.place = ""
        """Its URL, of whose secrets the log has none."""
        self._breaker = CircuitBreaker(f"with the files of clients, {name}", *REST_S)
        self._threads = Threads(f"files-{name}", THREADS, MOST_WAITING, wait_s, is_background=False)
        self._wait_s = wait_s

    @contextlib.contextmanager
    def serving(self, *expected: type[Exception]) -> Iterator[None]:
        """The place is asked within: what it raises becomes FilesUnusable, and it is left alone for a while.

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

    def wait_for(self, call: Callable[[], T]) -> T:
        """What a call gives that is made in a thread of the place. Raises: FilesUnusable if it is late; as the call."""
        running = self._begin(call, self._wait_s)
        while True:
            with contextlib.suppress(TimeoutError):
                return running.future.result(running.left_s)
            if running.future.done():
                return running.future.result()
            self._check(running, is_failure=True)

    async def wait_for_async(self, call: Callable[[], T], longest_s: float | None = None) -> T:
        """As `wait_for`, in the event loop.

        longest_s: seconds, in the place of wait_s, for a call that takes as long as a tenant has files, or a file has
        bytes. If it is late, that alone is not the place's failure.
        """
        running = self._begin(call, longest_s or self._wait_s)
        waiting = asyncio.wrap_future(running.future)
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # also where nobody asks any more
        try:
            while not (await asyncio.wait([waiting], timeout=running.left_s))[0]:
                self._check(running, is_failure=longest_s is None)
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

    def _check(self, running: _Call[T], *, is_failure: bool) -> None:
        """Raises: FilesUnusable where a call is late, or waits for threads that hang."""
        if running.is_late and is_failure:
            self._breaker.record_failure(f"no answer within {self._wait_s:g} s")
        elif self._threads.are_stuck():
            self._breaker.record_failure(_ALL_HANG)
        if running.is_late or self._breaker.is_open():
            running.give_up()
            raise FilesUnusable(UNREACHABLE)
