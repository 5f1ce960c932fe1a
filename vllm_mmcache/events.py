# SPDX-License-Identifier: Apache-2.0
"""What the rooms count. Plain numbers per process; observe/ carries them to /metrics.

A room counts an event by name and goes on: nothing here may ever fail a request.
"""

import threading

_lock = threading.Lock()
_counts: dict[str, float] = {}


def count(name: str, amount: float = 1) -> None:
    """Add to a counter; any thread."""
    with _lock:
        _counts[name] = _counts.get(name, 0) + amount


def totals() -> dict[str, float]:
    """All counters of this process since its start."""
    with _lock:
        return dict(_counts)
