# SPDX-License-Identifier: Apache-2.0
"""Counters: many threads, and what prometheus shows, in one process and in several."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vllm_mmcache.base import status
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.metrics import counters, transport

SEVERAL = """
import os
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from vllm_mmcache.metrics import counters
counters.register()
if os.fork() == 0:
    counters.BYTES_LIFTED.add(30)
    os._exit(0)
os.wait()
counters.BYTES_LIFTED.add(12)
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


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


@pytest.mark.process
def test_several_processes(tmp_path: Path) -> None:
    """As with several API servers: vLLM has set the directory before anything is counted."""
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SEVERAL], env=environment, capture_output=True, text=True, timeout=60)
    assert "mmcache:bytes_lifted_total 42.0" in done.stdout, done.stderr
    assert "mmcache:images_decoded_total 0.0" in done.stdout


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
