# SPDX-License-Identifier: Apache-2.0
"""Sizes of tables of several servers and an engine, as /metrics shows them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SEVERAL = """
import os
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from vllm_mmcache.base.lru import Size
from vllm_mmcache.metrics import table_sizes
def measure(): return Size(1, 10, 100)
table_sizes.of_server("t", measure)
reading, writing = os.pipe()
if os.fork() == 0:
    table_sizes.show()
    table_sizes.show_changed("size/e/bytes", 5, 0)
    os.write(writing, b"x")
    import time; time.sleep(60)
os.read(reading, 1)
table_sizes.show()
table_sizes.show_changed("size/e/bytes", 7, 0)
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode(), flush=True)
os.killpg(0, 9)
"""
# Loads what an API server has; a table that nobody named would be missing.
OF_A_SERVER = """
import vllm_mmcache.components.identity.aliases
import vllm_mmcache.components.lazy_media.video.video_info
import vllm_mmcache.components.observe.record.recorder
import vllm_mmcache.content.base64_image
import vllm_mmcache.content.placeholders
from vllm_mmcache.metrics import table_sizes
from vllm_mmcache.storage import record_store
record_store.current()
print(*table_sizes._server)
"""


@pytest.mark.process
def test_several_servers_add_up_and_an_engine_is_told_once(tmp_path: Path) -> None:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        start_new_session=True,
    )
    assert 'mmcache:table_bytes{table="t"} 20.0' in done.stdout, done.stderr
    assert 'mmcache:table_budget_bytes{table="t"} 200.0' in done.stdout
    assert re.search(r'mmcache:engine_table_bytes\{[^}]*table="e"[^}]*\} 7.0', done.stdout)


@pytest.mark.process
def test_a_server_names_every_table() -> None:
    done = subprocess.run([sys.executable, "-c", OF_A_SERVER], capture_output=True, text=True, check=True, timeout=300)
    server = "bodies images videos texts uuids records records_waiting observed answers"
    assert set(done.stdout.split()) == set(server.split())
