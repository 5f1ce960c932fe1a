# SPDX-License-Identifier: Apache-2.0
"""Counters of several processes, as prometheus shows them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.process
def test_several_processes(tmp_path: Path) -> None:
    """As with several API servers: vLLM has set the directory before anything is counted."""
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SEVERAL], env=environment, capture_output=True, text=True, timeout=60)
    assert "mmcache:bytes_lifted_total 42.0" in done.stdout, done.stderr
    assert "mmcache:images_decoded_total 0.0" in done.stdout
