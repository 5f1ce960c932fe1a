# SPDX-License-Identifier: Apache-2.0
"""Circuit breakers: a tier that fails is left alone for a while, so that it does not slow down each request.

The log has one line when a tier stops working and one when it works again, not one per request. Any thread of one
process.
"""

import logging
import threading
import time

logger = logging.getLogger("vllm.mmcache")


class Breaker:
    """A failing tier rests for `first_s` seconds, and twice as long after each further failure, up to `longest_s`."""

    def __init__(self, name: str, first_s: float, longest_s: float) -> None:
        self.name = name
        self._first_s = first_s
        self._longest_s = longest_s
        self._failing = False
        self._rest_s = first_s
        self._until = 0.0
        self._lock = threading.Lock()

    def resting(self) -> bool:
        """Whether the tier must be left alone now."""
        return time.monotonic() < self._until

    def failed(self, error: object) -> None:
        """Begin or lengthen the rest; several threads that fail at once count as one."""
        with self._lock:
            if self.resting():
                return
            first = not self._failing
            self._failing = True
            self._rest_s = self._first_s if first else min(2 * self._rest_s, self._longest_s)
            self._until = time.monotonic() + self._rest_s
        if first:
            logger.warning(
                "mmcache %s is off, and is tried again after %g s, later up to %g s: %s. Serving goes on without it.",
                self.name,
                self._first_s,
                self._longest_s,
                error,
            )

    def worked(self) -> None:
        """The tier works again. A success that comes while it rests began before the failure, and is not counted."""
        if not self._failing or self.resting():
            return
        with self._lock:
            self._failing = False
            self._until = 0.0
        logger.info("mmcache %s works again", self.name)
