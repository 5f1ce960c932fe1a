# SPDX-License-Identifier: Apache-2.0
"""A few daemon threads that read for others, and a queue that is bounded: a tier that hangs takes these and no more.

concurrent.futures won't do: its threads are joined when the interpreter ends, which one that hangs never lets happen.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from vllm_mmcache.base import background

logger = logging.getLogger("vllm.mmcache")

STUCK_S = 10.0
"""A job that runs for longer may never end. Where all threads have one, no more are taken."""


def start_thread(run: Callable[..., None], name: str, *args: object) -> threading.Thread | None:
    """A daemon thread that calls `run` with `args`; None where the machine has no more threads, but may have later."""
    thread = threading.Thread(target=run, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        logger.debug("mmcache: %s was not started: %s", name, error)
        return None
    return thread


class Threads:
    """`count` threads, started when they are first needed; up to `most_waiting` jobs wait for them. Any thread.

    stuck_s: seconds after which a job counts as one that may never end. is_background: whether other threads go first
    where there are too few cores.
    """

    def __init__(
        self, name: str, count: int, most_waiting: int = 1024, stuck_s: float = STUCK_S, is_background: bool = True
    ) -> None:
        self._name = name
        self._count = count
        self._most_waiting = most_waiting
        self._stuck_s = stuck_s
        self._is_background = is_background
        self._changed = threading.Condition()
        self._jobs: deque[tuple[Callable[[], None], float]] = deque()  # and after how long each counts as stuck
        self._until: dict[int, float] = {}  # thread number -> when its job begins to count as stuck
        self._num_started = 0
        self._closed = False

    def submit(self, job: Callable[[], None], stuck_s: float | None = None) -> bool:
        """Have a job done soon. Returns False, and forgets it, where too many wait, or no thread can take it.

        stuck_s: of this job, in the place of that of the threads.
        """
        with self._changed:
            if self._closed or len(self._jobs) >= self._most_waiting or self.are_stuck():
                return False
            if len(self._jobs) + len(self._until) >= self._num_started:
                self._start()
            if not self._num_started:
                return False
            self._jobs.append((job, self._stuck_s if stuck_s is None else stuck_s))
            self._changed.notify()
        return True

    def close(self) -> None:
        """Take no more jobs, forget those that wait, and let the threads end after what they do now."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()

    def _start(self) -> None:
        number = self._num_started
        if number == self._count:
            return
        if start_thread(self._run, f"mmcache-{self._name}-{number}", number) is not None:
            self._num_started += 1

    def are_stuck(self) -> bool:
        """Whether every thread has a job that may never end."""
        now, until = time.monotonic(), list(self._until.values())
        return len(until) == self._count and all(now > one for one in until)

    def _run(self, number: int) -> None:
        if self._is_background:
            background.lower_priority()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
                job, stuck_s = self._jobs.popleft()
                self._until[number] = time.monotonic() + stuck_s
            try:
                job()
            except Exception:  # a bug of ours must not end the thread
                logger.exception("mmcache: a job of %s failed; serving goes on without it", self._name)
            del job  # what it holds must not wait for the next one
            with self._changed:
                del self._until[number]
