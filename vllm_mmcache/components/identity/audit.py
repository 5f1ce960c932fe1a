# SPDX-License-Identifier: Apache-2.0
"""Counts what clients should not do, and logs at most one line per kind and minute, without a client's text."""

import logging
import threading
import time

from vllm_mmcache.metrics.counters import Counter

INTERVAL_S = 60.0

logger = logging.getLogger("vllm.mmcache")

_said: dict[str, float] = {}  # name of the counter -> when
_lock = threading.Lock()


def note(counter: Counter, what: str) -> None:
    """Count one, and log a warning if there was none of this kind within the last minute. Any thread."""
    counter.add()
    now = time.monotonic()
    with _lock:
        last = _said.get(counter.name)
        if last is not None and now - last < INTERVAL_S:
            return
        _said[counter.name] = now
    logger.warning("mmcache identity: %s (%d in all, see mmcache:%s_total)", what, counter.value, counter.name)
