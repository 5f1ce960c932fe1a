# SPDX-License-Identifier: Apache-2.0
"""Counters: many threads, and what prometheus shows, in one process and in several."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vllm_mmcache import events

SEVERAL = """
import os
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from vllm_mmcache import events
events.expose()
if os.fork() == 0:
    events.BYTES_LIFTED.add(30)
    os._exit(0)
os.wait()
events.BYTES_LIFTED.add(12)
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_threads() -> None:
    counter = events.Counter("test_threads", "A test.")
    threads = [threading.Thread(target=lambda: [counter.add(0.5) for _ in range(1000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.value == 4000


def test_prometheus_shows_them() -> None:
    from prometheus_client import REGISTRY

    events.expose()
    before = REGISTRY.get_sample_value("mmcache:bytes_lifted_total")
    assert before is not None
    events.BYTES_LIFTED.add(7)
    assert REGISTRY.get_sample_value("mmcache:bytes_lifted_total") == before + 7


def test_seconds_are_counted_when_the_block_fails() -> None:
    counter = events.Counter("test_seconds", "A test.")
    with pytest.raises(ValueError, match="no"), counter.seconds():
        raise ValueError("no")
    assert 0 < counter.value < 600, "seconds"


def test_several_processes(tmp_path: Path) -> None:
    """As with several API servers: vLLM has set the directory before anything is counted."""
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SEVERAL], env=environment, capture_output=True, text=True, timeout=300)
    assert "mmcache:bytes_lifted_total 42.0" in done.stdout, done.stderr
    assert "mmcache:images_decoded_total 0.0" in done.stdout


def test_bookkeeping_never_fails_a_request(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One log line per room, with the traceback; what follows goes on."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(events, "_logged", set())
    for _ in range(3):
        with events.guarded("a room"):
            raise KeyError("lost")
    ours = [record for record in caplog.records if record.name.startswith("vllm.mmcache")]
    assert [record.message for record in ours] == ["mmcache: bookkeeping of a room failed; requests go on without it"]
