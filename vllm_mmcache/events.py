# SPDX-License-Identifier: Apache-2.0
"""Plain counters that the rooms add to, and vLLM's own /metrics shows. Any process, any thread.

The prometheus side of a counter is made when it is first needed: vLLM decides between one and several API server
processes (PROMETHEUS_MULTIPROC_DIR) after plugins are loaded. Counting must never fail a request.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger("vllm.mmcache")

_logged: set[str] = set()


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


class EngineCounter(Counter):
    """A sum that grows in the engine, and is shown by the API server, to which observe/ carries it.

    `add` counts for the engine alone; it makes no prometheus side there, which nobody would read.
    """

    def __init__(self, name: str, meaning: str) -> None:
        super().__init__(name, meaning)
        self._taken = 0.0

    def add(self, amount: float = 1) -> None:
        """Count `amount` in the engine."""
        with self._lock:
            self.value += amount

    def take(self) -> int:
        """What was counted since the last take, in millionths, since only whole numbers travel."""
        with self._lock:
            millionths = round((self.value - self._taken) * 1e6)
            self._taken = self.value
        return millionths

    def show(self, millionths: int) -> None:
        """Add what an engine has counted to what /metrics shows."""
        self.expose()
        self._prometheus.inc(millionths / 1e6)


class LabelledCounter:
    """A sum for each of a few label values; `mmcache:<name>_total` on /metrics. The values must be bounded."""

    def __init__(self, name: str, meaning: str, labels: tuple[str, ...]) -> None:
        self.name = name
        self.meaning = meaning
        self.labels = labels
        self._children: dict[tuple[str, ...], Any] = {}
        self._prometheus: Any = None
        self._lock = threading.Lock()

    def add(self, amount: float, *values: str) -> None:
        """Count `amount` under these label values, in the order of the labels."""
        child = self._children.get(values)
        if child is None:
            self.expose()
            child = self._children[values] = self._prometheus.labels(*values)
        child.inc(amount)

    def expose(self) -> None:
        """Make the prometheus side, if it is not there yet."""
        with self._lock:
            if self._prometheus is None:
                import prometheus_client

                self._prometheus = prometheus_client.Counter(f"mmcache:{self.name}", self.meaning, self.labels)


IMAGES_DECODED = Counter("images_decoded", "Images whose pixels were decoded.")
IMAGES_AVOIDED = Counter("images_avoided", "Images that were known and handed on undecoded.")
IMAGES_DECODED_LATE = Counter("images_decoded_late", "Images handed on undecoded whose pixels were needed after all.")
BYTES_LIFTED = Counter("bytes_lifted", "Bytes of base64 text taken out of request bodies before parsing.")
IMAGES_LIFTED = Counter("images_lifted", "Images taken out of request bodies before parsing.")
BODY_SECONDS = Counter("body_seconds", "Seconds spent on taking images out of request bodies.")
MEDIA_SECONDS = Counter("media_seconds", "Seconds spent on opening images, decoding included, over all threads.")

CHECKPOINTS_MADE = EngineCounter("checkpoints_made", "Image boundaries kept as positions to resume at.")
CHECKPOINTS_USED = EngineCounter("checkpoints_used", "Prefix hits that ended on a checkpoint.")
CHECKPOINTS_EVICTED_UNUSED = EngineCounter("checkpoints_evicted_unused", "Checkpoints evicted before any hit.")
CHECKPOINT_BLOCKS = EngineCounter("checkpoint_blocks", "KV blocks kept for checkpoints, all groups.")
CHECKPOINT_TOKENS_SAVED = EngineCounter("checkpoint_tokens_saved", "Tokens of the hits that ended on a checkpoint.")
CHECKPOINT_REQUESTS_BACKED_OFF = EngineCounter(
    "checkpoint_requests_backed_off", "Requests with images for which a kind of checkpoint was given up."
)

TOWER_IMAGES = EngineCounter("tower_images", "Images that went through the vision tower.")
TOWER_PATCHES = EngineCounter("tower_patches", "Patches that went through the vision tower.")
TOWER_SECONDS = EngineCounter("tower_seconds", "Seconds in the vision tower.")
TOWER_IMAGES_AVOIDED = EngineCounter("tower_images_avoided", "Images whose features were stored, so no tower ran.")

# With the setting observe. The values are those of observe/schema.py, so there are few.
PROMPT_TOKENS = LabelledCounter(
    "prompt_tokens",
    "Prompt tokens by outcome (reused, computed) and by the reason for computing.",
    ("outcome", "reason"),
)
PROMPT_IMAGES = LabelledCounter("prompt_images", "Images of prompts, by where their features came from.", ("features",))

ENGINE_COUNTERS = {
    counter.name: counter
    for counter in (
        CHECKPOINTS_MADE,
        CHECKPOINTS_USED,
        CHECKPOINTS_EVICTED_UNUSED,
        CHECKPOINT_BLOCKS,
        CHECKPOINT_TOKENS_SAVED,
        CHECKPOINT_REQUESTS_BACKED_OFF,
        TOWER_IMAGES,
        TOWER_PATCHES,
        TOWER_SECONDS,
        TOWER_IMAGES_AVOIDED,
    )
}

COUNTERS = (
    IMAGES_DECODED,
    IMAGES_AVOIDED,
    IMAGES_DECODED_LATE,
    BYTES_LIFTED,
    IMAGES_LIFTED,
    BODY_SECONDS,
    MEDIA_SECONDS,
    *ENGINE_COUNTERS.values(),
)


def expose() -> None:
    """Show all counters, also those that are still zero."""
    for counter in COUNTERS:
        counter.expose()


@contextlib.contextmanager
def guarded(room: str) -> Iterator[None]:
    """Our own bookkeeping: an error in it is logged once per room and never fails a request."""
    try:
        yield
    except Exception:
        if room not in _logged:
            _logged.add(room)
            logger.exception("mmcache: bookkeeping of %s failed; requests go on without it", room)


_feature_sources: dict[str, str] = {}  # identifier -> where its features came from, until the scheduler asks
_FEATURE_SOURCES = 4096


def note_feature_source(identifier: str, source: str) -> None:
    """The worker has the features of an image: from ram, disk, remote, or the tower."""
    _feature_sources[identifier] = source
    if len(_feature_sources) > _FEATURE_SOURCES:
        _feature_sources.pop(next(iter(_feature_sources)), None)


def take_feature_source(identifier: str) -> str:
    """Where the features of an image came from when they were last needed; empty where this process doesn't know."""
    return _feature_sources.pop(identifier, "")


def take_engine_counts() -> dict[str, int]:
    """By name, in millionths, what the engine has counted since the last call; without what stood still."""
    return {name: millionths for name, counter in ENGINE_COUNTERS.items() if (millionths := counter.take())}


def show_engine_count(name: str, millionths: int) -> None:
    """Show what an engine has counted; a name that only a newer engine knows is left out."""
    if name in ENGINE_COUNTERS:
        ENGINE_COUNTERS[name].show(millionths)


def totals() -> dict[str, float]:
    """What was counted in this process, by name."""
    return {counter.name: counter.value for counter in COUNTERS}
