# SPDX-License-Identifier: Apache-2.0
"""A server in a pod's limits, all at once: root read-only, no home, a user that nobody knows, 64 MiB of /dev/shm.

And with the variables of a Service named `mmcache`, and one of a newer version.
"""

import re
import sys
from pathlib import Path

import pytest
from mmcache_tools.harness.server import free_port, wait_until_healthy
from mmcache_tools.zoo import build_cached

from tests.support.deployment import ARGS, Deployment, environment, start
from tests.system.kubernetes.container import REPO, in_pod
from tests.unit.base.test_settings import SERVICE

HOMES = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "USER", "LOGNAME", "TMPDIR")
# The model runs in the engine's process, as on one GPU. On a CPU vLLM would begin a process for it and refuse to start,
# since the queues between the two need 400 MiB of /dev/shm.
ONE_PROCESS = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")


@pytest.mark.engine
def test_a_server_in_a_pod(tmp_path: Path) -> None:
    model = build_cached("qwen3-vl", tmp_path / "zoo")
    volume, port = tmp_path / "volume", str(free_port())
    served = [
        sys.executable,
        "-m",
        "vllm_mmcache.cli",
        "serve",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        port,
        *ARGS,
        *ONE_PROCESS,
    ]
    variables = SERVICE | {"MMCACHE_STORE": str(volume), "MMCACHE_OF_A_LATER_VERSION": "1"}
    environ = {name: value for name, value in environment([REPO], variables).items() if name not in HOMES}
    with start(tmp_path / "log", in_pod(served, tmp_path), environ) as process:
        running = Deployment(f"http://127.0.0.1:{port}", tmp_path / "log", process)
        wait_until_healthy(running, 300)
        root = Path(f"/proc/{process.pid}/root")
        first = running.ask(1)
        running.forget()
        again = running.ask(1)
        assert again.equals(first)
        assert running.total("tower_images_avoided") >= 1
        states = {component: state for component, (state, _) in running.components().items()}
        assert {states[component] for component in ("features", "identity", "lazy_processing", "block_keys")} == {
            "on"
        }, running.components()
        in_memory = {path.name for path in (root / "dev/shm").iterdir()}
        assert all(name.startswith(("psm_", "sem.")) for name in in_memory), in_memory  # vLLM's, and Python's
        stored = root / volume.relative_to("/")
        assert sorted(path.name for path in stored.iterdir()) == ["features", "records"]
        owner = (root / f"proc/{process.pid}").stat().st_uid
        assert {path.stat().st_uid for path in (stored / "features", stored / "records")} == {owner}
    said = running.log()
    (line,) = re.findall(r" (?:WARNING|ERROR) .*?\] (mmcache.*)", said)  # of all processes
    assert line.startswith("mmcache: MMCACHE_OF_A_LATER_VERSION is no setting and has no effect")
