# SPDX-License-Identifier: Apache-2.0
"""Plain counters that the rooms add to, and vLLM's own /metrics shows. Any process, any thread.

The prometheus side of a counter is made when it is first needed: vLLM decides between one and several API server
processes (PROMETHEUS_MULTIPROC_DIR) after plugins are loaded. Counting must never fail a request.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any


class Counter:
    """A sum that only grows; `mmcache:<name>_total` on /metrics."""

    def __init__(self, name: str, meaning: str) -> None:
        self.name = name
        self.meaning = meaning
        self.value = 0.0
        self._lock = threading.Lock()
        self._prometheus: Any = None

    def add(self, amount: float = 1) -> None:
        """Count `amount`, which is not negative."""
        self.expose()
        with self._lock:
            self.value += amount
        self._prometheus.inc(amount)

    def expose(self) -> None:
        """Make the prometheus side, if it is not there yet."""
        with self._lock:
            if self._prometheus is None:
                import prometheus_client

                self._prometheus = prometheus_client.Counter(f"mmcache:{self.name}", self.meaning)

    @contextlib.contextmanager
    def seconds(self) -> Iterator[None]:
        """Count the seconds that the block takes, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(time.perf_counter() - start)


IMAGES_DECODED = Counter("images_decoded", "Images whose pixels were decoded.")
IMAGES_AVOIDED = Counter("images_avoided", "Images that were known and handed on undecoded.")
IMAGES_DECODED_LATE = Counter("images_decoded_late", "Images handed on undecoded whose pixels were needed after all.")
BYTES_LIFTED = Counter("bytes_lifted", "Bytes of base64 text taken out of request bodies before parsing.")
IMAGES_LIFTED = Counter("images_lifted", "Images taken out of request bodies before parsing.")
BODY_SECONDS = Counter("body_seconds", "Seconds spent on taking images out of request bodies.")
MEDIA_SECONDS = Counter("media_seconds", "Seconds spent on opening images, decoding included, over all threads.")

COUNTERS = (
    IMAGES_DECODED,
    IMAGES_AVOIDED,
    IMAGES_DECODED_LATE,
    BYTES_LIFTED,
    IMAGES_LIFTED,
    BODY_SECONDS,
    MEDIA_SECONDS,
)


def expose() -> None:
    """Show all counters, also those that are still zero."""
    for counter in COUNTERS:
        counter.expose()
