# SPDX-License-Identifier: Apache-2.0
"""Counters: many threads, and what prometheus shows, in one process."""

import threading

import pytest

from vllm_mmcache.base import settings, status
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.metrics import counters, transport


def test_threads() -> None:
    counter = counters.Counter("test_threads", "A test.")
    threads = [threading.Thread(target=lambda: [counter.add(0.5) for _ in range(1000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.value == 4000


def test_prometheus_shows_them() -> None:
    from prometheus_client import REGISTRY

    counters.register()
    before = REGISTRY.get_sample_value("mmcache:bytes_lifted_total")
    assert before is not None
    counters.BYTES_LIFTED.add(7)
    assert REGISTRY.get_sample_value("mmcache:bytes_lifted_total") == before + 7


def test_seconds_are_counted_when_the_block_fails() -> None:
    counter = counters.Counter("test_seconds", "A test.")
    with pytest.raises(ValueError, match="no"), counter.seconds():
        raise ValueError("no")
    assert 0 < counter.value < 1


def test_bookkeeping_never_fails_a_request(log: pytest.LogCaptureFixture) -> None:
    """One log line per component, with the traceback; what follows goes on."""
    for _ in range(3):
        with failsafe("a component"):
            raise KeyError("lost")
    assert [record.message for record in log.records] == [
        "mmcache: bookkeeping of a component failed; requests go on without it"
    ]


def test_a_worker_takes_its_counts_once_and_leaves_what_the_engine_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the two are one process."""
    monkeypatch.setitem(status._is_on, "metrics", True)
    monkeypatch.setattr(transport, "_counted", {})
    monkeypatch.setattr(transport, "_feature_sources", {})
    transport.note_feature_source("an image", "ram")
    assert transport.take_worker_counts() is None
    transport.count("tower_images", 2.0)
    assert transport.take_worker_counts() == {"tower_images": 2.0}
    assert transport.take_worker_counts() is None
    assert transport.take_feature_source("an image") == "ram"
    assert transport.take_feature_source("an image") == ""


def test_what_places_count_starts_at_zero() -> None:
    """Prometheus sees no increase in a series whose first value is 1, and an alert would miss the first fault."""
    from prometheus_client import REGISTRY

    counters.register()
    for place in counters.PLACES:
        for counter in counters.TIER_COUNTERS.values():
            assert REGISTRY.get_sample_value(f"mmcache:{counter.name}_total", {"tier": place}) is not None
        for of_records in counters.RECORD_COUNTERS.values():
            assert REGISTRY.get_sample_value(f"mmcache:{of_records.name}_total", {"place": place}) is not None
    name, labels = "mmcache:features_set_aside_total", {"tier": "a place that nobody knows"}
    assert REGISTRY.get_sample_value(name, labels) is None, "negative control"
    counters.TIER_COUNTERS["set_aside"].show(2, "disk")
    counters.register()  # of one more API server in this process: what is counted stays
    assert (REGISTRY.get_sample_value(name, {"tier": "disk"}) or 0) >= 2


@pytest.mark.parametrize("audit", [0.0, 0.001])
def test_what_the_audit_counts_starts_at_zero_where_there_is_one(audit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, ...]] = []
    monkeypatch.setattr(counters.AUDIT, "show_zero", lambda *values: shown.append(values))
    monkeypatch.setattr(settings, "_current", settings.Settings(audit=audit))
    counters.register()
    assert (("block_keys", "mismatch") in shown) == bool(audit)
    assert len(shown) == len(set(shown)) == len(counters.AUDITED) * len(counters.AUDIT_RESULTS) * bool(audit)
