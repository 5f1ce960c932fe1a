# SPDX-License-Identifier: Apache-2.0
"""What a worker or an engine has counted, until `metrics/hooks.py` takes it on its way to the API server.

Imports no vLLM. Any thread.
"""

import threading
from collections.abc import Sequence
from typing import Any

from vllm_mmcache.base import status

_counted: dict[str, float] = {}  # counted here or received from a worker, and not yet taken further
_feature_sources: dict[str, str] = {}  # identifier -> where its features came from, until the scheduler asks
_FEATURE_SOURCES = 4096
_lock = threading.Lock()


def count(name: str, amount: float) -> None:
    """Count `amount`, to be shown under `name` by the API server. Engine or worker process."""
    if amount:  # what stood still has nothing to tell
        with _lock:
            _counted[name] = _counted.get(name, 0.0) + amount


def note_feature_source(identifier: str, source: str) -> None:
    """The worker has the features of an image from a tier of the store: ram, disk or remote."""
    with _lock:
        _feature_sources[identifier] = source
        if len(_feature_sources) > _FEATURE_SOURCES:
            _feature_sources.pop(next(iter(_feature_sources)))


def take_feature_source(identifier: str) -> str:
    """The tier that gave the features of an image when they were last needed; empty for the tower."""
    with _lock:
        return _feature_sources.pop(identifier, "")


def take_worker_news() -> tuple[dict[str, float], dict[str, str]] | None:
    """All that a worker has counted and noted since the last call; None where nothing happened, or metrics is off."""
    if not (_counted or _feature_sources) or not status.is_on("metrics"):
        return None
    with _lock:
        news = dict(_counted), dict(_feature_sources)
        _counted.clear()
        _feature_sources.clear()
    return news


def receive_worker_news(news: Sequence[dict[str, Any]]) -> None:
    """The engine, or the next pipeline stage, knows what a worker knows; the two may be one process."""
    counts, sources = news
    for name, amount in counts.items():
        count(name, amount)
    for identifier, source in sources.items():
        note_feature_source(identifier, source)


def take_engine_counts() -> dict[str, float]:
    """By name, what was counted since the last call."""
    if not status.is_on("metrics"):
        return {}
    with _lock:
        counts = {name: float(amount) for name, amount in _counted.items()}
        _counted.clear()
    return counts
