# SPDX-License-Identifier: Apache-2.0
"""Plain counters that the components add to, and vLLM's own /metrics shows. Any process, any thread.

The prometheus side of a counter is made when it is first needed: vLLM decides between one and several API server
processes (PROMETHEUS_MULTIPROC_DIR) after plugins are loaded. Counting must never fail a request.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

from vllm_mmcache.base import settings
from vllm_mmcache.metrics import transport


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
        self.register()
        with self._lock:
            self.value += amount
        self._prometheus.inc(amount)

    def register(self) -> None:
        """Register the counter with prometheus_client, where it is shown, if it is not yet. API server."""
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
    """A sum that grows in the engine or its worker, and is shown by the API server.

    metrics/hooks.py carries there what was counted. `add` registers nothing with prometheus_client: where it counts,
    nobody would read it.
    """

    def add(self, amount: float = 1) -> None:
        """Count `amount` in the engine or the worker."""
        with self._lock:
            self.value += amount
        transport.count(self.name, amount)

    def show(self, amount: float) -> None:
        """Add what an engine has counted to what /metrics shows."""
        self.register()
        self._prometheus.inc(amount)


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
            child = self._start(*values)
        child.inc(amount)

    def show_zero(self, *values: str) -> None:
        """Show 0 under these label values until something is counted. API server."""
        if values not in self._children:
            self._start(*values)

    def _start(self, *values: str) -> Any:
        self.register()
        child = self._children[values] = self._prometheus.labels(*values)
        return child

    def register(self) -> None:
        """Register the counter with prometheus_client, where it is shown, if it is not yet. API server."""
        with self._lock:
            if self._prometheus is None:
                import prometheus_client

                self._prometheus = prometheus_client.Counter(f"mmcache:{self.name}", self.meaning, self.labels)


class EngineLabelledCounter(LabelledCounter):
    """A sum for each of a few label values; it grows in the engine and travels as an EngineCounter does."""

    def add(self, amount: float, *values: str) -> None:
        """Count `amount` under these label values, in the engine."""
        transport.count("/".join((self.name, *values)), amount)

    def show(self, amount: float, *values: str) -> None:
        """Add what an engine has counted to what /metrics shows."""
        super().add(amount, *values)


class Gauge:
    """A size that is now; `mmcache:<name>` on /metrics. API server."""

    def __init__(self, name: str, meaning: str) -> None:
        self.name = name
        self.meaning = meaning
        self._prometheus: Any = None
        self._lock = threading.Lock()

    def show(self, size: float) -> None:
        """Say how large it is now."""
        self.register()
        self._prometheus.set(size)

    def register(self) -> None:
        """Register the gauge with prometheus_client, where it is shown, if it is not yet. API server."""
        with self._lock:
            if self._prometheus is None:
                import prometheus_client

                self._prometheus = prometheus_client.Gauge(
                    f"mmcache:{self.name}", self.meaning, multiprocess_mode="mostrecent"
                )


class Info:
    """What holds here, as labels of a gauge that is 1; `mmcache:<name>` on /metrics. API server."""

    def __init__(self, name: str, meaning: str, labels: tuple[str, ...]) -> None:
        self.name = name
        self.meaning = meaning
        self.labels = labels
        self._prometheus: Any = None
        self._shown: set[tuple[str, ...]] = set()

    def show(self, values: Iterable[tuple[str, ...]]) -> None:
        """Say what holds now, in the order of the labels; what held before becomes 0."""
        if self._prometheus is None:
            import prometheus_client

            self._prometheus = prometheus_client.Gauge(
                f"mmcache:{self.name}", self.meaning, self.labels, multiprocess_mode="mostrecent"
            )
        now = set(values)
        for gone in self._shown - now:
            self._prometheus.labels(*gone).set(0)
        for one in now:
            self._prometheus.labels(*one).set(1)
        self._shown |= now


COMPONENT_INFO = Info(
    "component_info",
    "What each component is over all processes: on, off, unneeded, mixed.",
    ("component", "state", "reason"),
)

ROOM_INFO = Info(
    "room_info", "The same as component_info, under its older name; gone in version 0.2.", ("room", "state", "reason")
)

IMAGES_DECODED = Counter("images_decoded", "Images whose pixels were decoded.")
IMAGES_AVOIDED = Counter("images_avoided", "Images that were known and handed on undecoded.")
IMAGES_DECODED_LATE = Counter("images_decoded_late", "Images handed on undecoded whose pixels were needed after all.")
VIDEOS_DECODED = Counter("videos_decoded", "Videos whose frames were decoded.")
VIDEOS_AVOIDED = Counter("videos_avoided", "Videos that were known and handed on undecoded.")
VIDEOS_DECODED_LATE = Counter("videos_decoded_late", "Videos handed on undecoded whose frames were needed after all.")
BYTES_LIFTED = Counter("bytes_lifted", "Bytes of base64 text taken out of request bodies before parsing.")
IMAGES_LIFTED = Counter("images_lifted", "Images taken out of request bodies before parsing.")
BODIES_FAILED = Counter("bodies_failed", "Request bodies that an error of mmcache left as they came.")
BODY_SECONDS = Counter("body_seconds", "Seconds spent on taking images out of request bodies.")
MEDIA_SECONDS = Counter(
    "media_seconds", "Seconds spent on opening images and videos, decoding included, over all threads."
)

ALIASES_REBOUND = Counter("aliases_rebound", "Uuids that a tenant gave to other content than before.")
ALIASES_UNKNOWN = Counter("aliases_unknown", "Uuids without content that their tenant has not bound, or no longer.")
ALIASES_TOO_LONG = Counter("aliases_too_long", "Uuids refused because of their length.")

ITEMS_PROCESSED = Counter("items_processed", "Images and videos that went through vLLM's processor in an API server.")
ITEMS_DEFERRED = Counter("items_deferred", "Images and videos that went to the engine as their record and their bytes.")

CHECKPOINTS_MADE = EngineCounter("checkpoints_made", "Image boundaries kept as positions to resume at.")
CHECKPOINTS_USED = EngineCounter("checkpoints_used", "Prefix hits that ended on a checkpoint.")
CHECKPOINTS_EVICTED_UNUSED = EngineCounter("checkpoints_evicted_unused", "Checkpoints evicted before any hit.")
CHECKPOINT_BLOCKS = EngineCounter("checkpoint_blocks", "KV blocks kept for checkpoints, all groups.")
CHECKPOINT_TOKENS_SAVED = EngineCounter("checkpoint_tokens_saved", "Tokens of the hits that ended on a checkpoint.")
CHECKPOINT_REQUESTS_BACKED_OFF = EngineCounter(
    "checkpoint_requests_backed_off", "Requests with images for which a kind of checkpoint was given up."
)

TOWER_IMAGES = EngineCounter("tower_images", "Images and videos that went through the vision tower.")
TOWER_TOKENS = EngineCounter("tower_tokens", "Tokens of images and videos that the vision tower made.")
TOWER_SECONDS = EngineCounter("tower_seconds", "Seconds in the vision tower.")
TOWER_IMAGES_AVOIDED = EngineCounter(
    "tower_images_avoided", "Images and videos whose features were stored, so no tower ran."
)

PIXELS_MADE = EngineCounter("pixels_made", "Images and videos whose pixels were made after they had come without.")
PIXELS_MADE_LATE = EngineCounter("pixels_made_late", "Those of them that were made in a step, which waited.")
PIXELS_LATE_SECONDS = EngineCounter("pixels_late_seconds", "Seconds that steps waited for pixels.")

PLACES = ("ram", "disk", "remote")
"""Where packages and records may lie: the values of the labels `tier` and `place`."""

TIER_COUNTERS = {
    count: EngineLabelledCounter(f"features_{name}", meaning, ("tier",))
    for count, name, meaning in (
        ("hits", "hits", "Packages that a tier had."),
        ("misses", "misses", "Packages that a tier did not have."),
        ("saved", "saved", "Packages that a tier took."),
        ("read_bytes", "read_bytes", "Bytes of the packages that a tier had."),
        ("saved_bytes", "saved_bytes", "Bytes of the packages that a tier took."),
        ("evictions", "evictions", "Packages that had to go to make room."),
        ("errors", "errors", "Reads and writes that a tier could not do."),
        ("set_aside", "set_aside", "Files or entries that were no whole package."),
        ("dropped", "dropped", "Packages not kept: too large, or the tier was full, behind or failing."),
        ("load_s", "load_seconds", "Seconds of loading packages."),
        ("save_s", "save_seconds", "Seconds of saving packages."),
        ("not_asked", "not_asked", "Packages that a tier was not asked for: the tower is faster."),
        ("expected_load_s", "expected_load_seconds", "Seconds that loading was expected to take, at each decision."),
        ("expected_tower_s", "expected_tower_seconds", "Seconds that the tower was expected to take, at the same."),
    )
}

RECORD_COUNTERS = {
    name: LabelledCounter(f"record_{name}", meaning, ("place",))
    for name, meaning in (
        ("hits", "Records that a place had."),
        ("misses", "Records that a place did not have."),
        ("saved", "Records that a place took."),
        ("corrupt", "Records that were not whole, or of another key or format: each is a miss."),
        ("dropped", "Records not kept: too large, or the place was full, behind or failing."),
        ("errors", "Reads and writes that a place could not do."),
    )
}
RECORD_DISK_BYTES = Gauge("record_disk_bytes", "Bytes in use of the records' file.")
RECORD_DISK_BUDGET_BYTES = Gauge("record_disk_budget_bytes", "Bytes that the records' file may use.")

# With the setting observe. The values are those of components/observe/record/schema.py, so there are few.
FILE_REQUESTS = LabelledCounter(
    "file_requests",
    "Requests to /v1/files, and requests that name files (name), by what became of them: done, refused or failed.",
    ("operation", "result"),
)
FILES_NAMED = LabelledCounter(
    "files_named",
    "Images that requests named instead of sending them, by how (file_id, or uuid where another replica kept it).",
    ("by",),
)
PROMPT_TOKENS = LabelledCounter(
    "prompt_tokens",
    "Prompt tokens by outcome (reused, computed) and by the reason for computing.",
    ("outcome", "reason"),
)
OBSERVED_DROPPED = Counter("observed_dropped", "Records of requests that did not go into the file: behind, or failing.")
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
        PIXELS_MADE,
        PIXELS_MADE_LATE,
        PIXELS_LATE_SECONDS,
        TOWER_IMAGES,
        TOWER_TOKENS,
        TOWER_SECONDS,
        TOWER_IMAGES_AVOIDED,
    )
}

AUDIT = EngineLabelledCounter(
    "audit",
    "Requests whose answer was computed anew, by a component that had reused something for them, and by the result.",
    ("component", "result"),
)

AUDITED = (
    "features", "resumed_images", "inner_checkpoints", "image_checkpoints", "block_keys", "image_spans",
)  # fmt: skip
"""The values of its label `component`. Of those that give a request KV, the nearest to what is reused comes first."""
AuditResult = Literal["match", "mismatch", "cut", "unavailable"]
AUDIT_RESULTS: tuple[AuditResult, ...] = get_args(AuditResult)

_TRAVELLERS: dict[str, Any] = {
    **ENGINE_COUNTERS,
    **{counter.name: counter for counter in (*TIER_COUNTERS.values(), AUDIT)},
}

COUNTERS = (
    IMAGES_DECODED,
    IMAGES_AVOIDED,
    IMAGES_DECODED_LATE,
    VIDEOS_DECODED,
    VIDEOS_AVOIDED,
    VIDEOS_DECODED_LATE,
    ITEMS_PROCESSED,
    ITEMS_DEFERRED,
    BYTES_LIFTED,
    IMAGES_LIFTED,
    BODIES_FAILED,
    BODY_SECONDS,
    MEDIA_SECONDS,
    ALIASES_REBOUND,
    ALIASES_UNKNOWN,
    ALIASES_TOO_LONG,
    OBSERVED_DROPPED,
    *ENGINE_COUNTERS.values(),
)


def register() -> None:
    """Register all counters, so that those are shown, too, that are still zero. API server.

    Those of places start at zero, and those of the audit where there is one: Prometheus sees no increase in a series
    whose first value is 1, so an alert would miss the first fault.
    """
    for counter in COUNTERS:
        counter.register()
    for labelled in (*TIER_COUNTERS.values(), *RECORD_COUNTERS.values()):
        for place in PLACES:
            labelled.show_zero(place)
    for labelled in (AUDIT, FILE_REQUESTS, FILES_NAMED):
        labelled.register()
    if settings.current().audit:
        for component, result in itertools.product(AUDITED, AUDIT_RESULTS):
            AUDIT.show_zero(component, result)
    for gauge in (RECORD_DISK_BYTES, RECORD_DISK_BUDGET_BYTES):
        gauge.register()


def show_engine_count(name: str, amount: float) -> None:
    """Show what an engine has counted; a name that only a newer engine knows is left out."""
    name, *labels = name.split("/")
    if name in _TRAVELLERS:
        _TRAVELLERS[name].show(amount, *labels)


def totals() -> dict[str, float]:
    """What was counted in this process, by name."""
    return {counter.name: counter.value for counter in COUNTERS}


Counts = tuple[dict[str, float], dict[str, float]]
"""What was counted in this process, and what of it was not taken further yet; by name."""


def snapshot() -> Counts:
    """What an engine or a worker has counted, for `restore`."""
    return {name: counter.value for name, counter in ENGINE_COUNTERS.items()}, transport.pending()


def restore(counts: Counts) -> None:
    """What an engine or a worker has counted since a snapshot is taken back."""
    values, pending = counts
    for name, value in values.items():
        ENGINE_COUNTERS[name].value = value
    transport.restore(pending)
