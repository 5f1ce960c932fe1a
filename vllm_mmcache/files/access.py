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
UNREACHABLE = "files can't be reached now: ask again later"


class _Call(Generic[T]):
    """What a thread of the place is to do, and what came of it."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self.begun: float | None = None
        self._call = call

    def run(self) -> None:
        """Do it, unless nobody waits for it any more."""
        if not self.future.set_running_or_notify_cancel():
            return
        self.begun = time.monotonic()
        try:
            self.future.set_result(self._call())
        except BaseException as error:
            self.future.set_exception(error)


class Access:
    """One of the two things that a place does: "reading" or "writing". The other one goes on when this one fails.

    wait_s: seconds that one call may take. Then the place counts as one that fails.
    """

    def __init__(self, name: str, wait_s: float) -> None:
        self.place = ""
        """Its URL, of whose secrets the log has none."""
        self._breaker = CircuitBreaker(f"with the files of clients, {name}", *REST_S)
        self._threads = Threads(f"files-{name}", THREADS, MOST_WAITING, wait_s)
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
            self._breaker.record_failure(error_without_secrets(error, self.place))
            raise FilesUnusable(UNREACHABLE) from error
        self._breaker.record_success()

    def wait_for(self, call: Callable[[], T]) -> T:
        """What a call gives that is made in a thread of the place. Raises: FilesUnusable after wait_s; as the call."""
        running = self._begin(call)
        while True:
            with contextlib.suppress(TimeoutError):
                return running.future.result(self._left_s(running))
            if running.future.done():
                return running.future.result()
            self._check(running)

    async def wait_for_async(self, call: Callable[[], T]) -> T:
        """As `wait_for`, in the event loop."""
        running = self._begin(call)
        waiting = asyncio.wrap_future(running.future)
        try:
            while not (await asyncio.wait([waiting], timeout=self._left_s(running)))[0]:
                self._check(running)
            return waiting.result()
        finally:
            waiting.cancel()

    def _begin(self, call: Callable[[], T]) -> _Call[T]:
        running = _Call(call)
        if self._breaker.is_open() or not self._threads.submit(running.run):
            raise FilesUnusable(UNREACHABLE)
        return running

    def _left_s(self, running: _Call[T]) -> float:
        """Seconds that a call has left; all of them while others are before it."""
        return self._wait_s if running.begun is None else max(0.0, running.begun + self._wait_s - time.monotonic())

    def _check(self, running: _Call[T]) -> None:
        """Raises: FilesUnusable where a call is late, or waits for others that were."""
        if running.begun is not None and self._left_s(running) == 0:
            self._breaker.record_failure(f"no answer within {self._wait_s:g} s")
        if self._breaker.is_open():
            running.future.cancel()
            raise FilesUnusable(UNREACHABLE)
