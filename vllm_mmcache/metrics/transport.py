# SPDX-License-Identifier: Apache-2.0
"""What a worker or an engine has counted or noted, until `metrics/hooks.py` forwards it to the API server.

Imports no vLLM. Any thread.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from vllm_mmcache.base import status

KEY = "mmcache"
"""Of our part in the statistics of an engine."""

_counted: dict[str, float] = {}  # counted here or received from a worker, and not yet taken further
_feature_sources: dict[str, str] = {}  # identifier -> where its features came from, until the scheduler asks
_FEATURE_SOURCES = 4096
_lock = threading.Lock()


STATES = "states"
"""Among what an engine has counted: what its components have become, where that has changed since it was ready."""

States = Mapping[str, Any]
"""Process of an engine -> its components, as plain data (lifecycle/rank_sync.py)."""

_listeners: list[Callable[[int, States], None]] = []


_is_heard = True  # whether there is an API server that takes our part out of the statistics


def await_listener() -> None:
    """Send nothing until `note_listener`: a stock API server would end at statistics that it does not know. Engine."""
    global _is_heard
    _is_heard = False


def note_listener() -> None:
    """An API server with mmcache has been heard of. Engine process."""
    global _is_heard
    _is_heard = True


def is_heard() -> bool:
    """Whether what is counted may be sent. Engine process."""
    return _is_heard


def listen(listener: Callable[[int, States], None]) -> None:
    """Have a function called with an engine's index and what its components have become. API server."""
    if listener not in _listeners:
        _listeners.append(listener)


def receive_states(engine: int, states: States) -> None:
    """An engine says what its components have become. API server."""
    for listener in _listeners:
        listener(engine, states)


def count(name: str, amount: float) -> None:
    """Count `amount`, to be shown under `name` by the API server. Engine or worker process."""
    if amount:  # what stood still has nothing to tell
        with _lock:
            _counted[name] = _counted.get(name, 0.0) + amount


def note_feature_source(identifier: str, source: str) -> None:
    """Note which tier of the store the ranks were told to take an image's features from. Engine process."""
    with _lock:
        _feature_sources[identifier] = source
        if len(_feature_sources) > _FEATURE_SOURCES:
            _feature_sources.pop(next(iter(_feature_sources)))


def take_feature_source(identifier: str) -> str:
    """The tier that gave the features of an image when they were last needed; empty for the tower. Engine process."""
    with _lock:
        return _feature_sources.pop(identifier, "")


def take_worker_counts() -> dict[str, float] | None:
    """What a worker has counted since the last call; None where it is nothing, or metrics is off. Worker process."""
    if not _counted or not status.is_on("metrics"):
        return None
    with _lock:
        counts = dict(_counted)
        _counted.clear()
    return counts


def receive_worker_counts(counts: Mapping[str, float]) -> None:
    """The engine, or the next pipeline stage, counts what a worker has counted; the two may be one process."""
    for name, amount in counts.items():
        count(name, amount)


def take_counts() -> dict[str, float]:
    """All counts of this engine and its workers since the last call, by name; {} where metrics is off."""
    if not status.is_on("metrics"):
        return {}
    with _lock:
        counts = {name: float(amount) for name, amount in _counted.items()}
        _counted.clear()
    return counts


def pending() -> dict[str, float]:
    """What was counted and not yet taken further."""
    with _lock:
        return dict(_counted)


def restore(counts: Mapping[str, float]) -> None:
    """What is to be taken further is this alone."""
    with _lock:
        _counted.clear()
        _counted.update(counts)
        _feature_sources.clear()
