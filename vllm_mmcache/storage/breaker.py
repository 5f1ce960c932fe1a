# SPDX-License-Identifier: Apache-2.0
"""Circuit breakers: what fails is left alone for a while, so that it does not slow down each request.

The log has one line when it is first left alone and one when it works again, not one per request. Any thread of one
process.
"""

import logging
import threading
import time

logger = logging.getLogger("vllm.mmcache")


class CircuitBreaker:
    """Open for `first_s` seconds after a failure, and twice as long after each further one, up to `longest_s`."""

    def __init__(self, name: str, first_s: float, longest_s: float) -> None:
        self.name = name
        self._first_s = first_s
        self._longest_s = longest_s
        self._failing = False
        self._open_s = first_s
        self._until = 0.0
        self._lock = threading.Lock()

    def is_open(self) -> bool:
        """Whether what failed must be left alone now."""
        return time.monotonic() < self._until

    def record_failure(self, error: object) -> None:
        """Open it, for longer than the last time; several threads that fail at once count as one."""
        with self._lock:
            if self.is_open():
                return
            first = not self._failing
            self._failing = True
            self._open_s = self._first_s if first else min(2 * self._open_s, self._longest_s)
            self._until = time.monotonic() + self._open_s
        if first:
            logger.warning(
                "mmcache %s is off, and is tried again after %g s, later up to %g s: %s. Serving goes on without it.",
                self.name,
                self._first_s,
                self._longest_s,
                error,
            )

    def record_success(self) -> None:
        """Close it. A success that comes while it is open began before the failure, and is not counted."""
        if not self._failing or self.is_open():
            return
        with self._lock:
            self._failing = False
            self._until = 0.0
        logger.info("mmcache %s works again", self.name)
