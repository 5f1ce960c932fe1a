# SPDX-License-Identifier: Apache-2.0
"""What a worker with a process of its own counts is on /metrics, and its records say which tier gave the features.

Of two pipeline stages the first one runs the tower, and the last one's outputs reach the engine.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mmcache_tools.harness.server import Server, serve
from mmcache_tools.zoo import build_cached

from tests.support.engine_configuration import CHOSEN
from tests.support.observing import assert_whole
from tests.system.observe.test_server import ARGS, picture, post
from vllm_mmcache.components.observe.record.file import read_records
from vllm_mmcache.components.observe.record.schema import Reason

pytestmark = pytest.mark.engine


NEEDS_V2 = pytest.mark.skipif(
    CHOSEN.runner == 1, reason="vLLM's runner V1 does not run pipeline stages on the CPU: its second stage asserts"
)


def shown(server: Server) -> dict[str, float]:
    """The samples of ours on /metrics, `name` or `name{tier}`."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        text = response.read().decode()
    samples = re.findall(r'^mmcache:(\w+)_total(?:\{tier="(\w+)"\})? (\S+)$', text, re.M)
    return {name + (f"{{{tier}}}" if tier else ""): float(value) for name, tier, value in samples}


def ask(server: Server, *parts: dict[str, Any] | str) -> None:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    body = {"model": "zoo", "messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0}
    assert post(server.url, body)["choices"]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.any_engine), pytest.param(2, marks=NEEDS_V2)])
def test_worker_counts(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, stages: int) -> None:
    model = build_cached("qwen3-vl", tmp_path_factory.mktemp("zoo"))
    path = tmp_path / "records.jsonl"
    env = {
        "MMCACHE_OBSERVE": "1",
        "MMCACHE_OBSERVE_FILE": str(path),
        "MMCACHE_STORE": str(tmp_path / "store"),
        "MMCACHE_STORE_WAIT_S": "20",  # however busy the machine is
        "MMCACHE_STORE_STEP_WAIT_S": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for the reset
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would bind each worker to a NUMA node of its own
    }
    args = (*ARGS, "--distributed-executor-backend", "mp", "--pipeline-parallel-size", str(stages))
    with serve(model, log_path=tmp_path / "log", env=env, args=args) as server:
        ask(server, picture("a"), "What is this?")
        first = shown(server)
        wait_for(lambda: any((tmp_path / "store").rglob("*.safetensors")))  # saving ends when it likes
        ask(server, picture("a"), "What is this?")  # everything is cached
        again = shown(server)
        reset = urllib.request.Request(f"{server.url}/reset_encoder_cache", method="POST")
        urllib.request.urlopen(reset, timeout=60).close()
        ask(server, "Look:", picture("a"), picture("b"), "What are these?")
        last = shown(server)
        wait_for(lambda: len(list(read_records(path))) == 3)
        log = (tmp_path / "log").read_text()
    assert len(set(re.findall(r"pid=(\d+)\).* \[worker\]", log))) == stages, "workers have processes of their own"
    assert ("Using V2 Model Runner" in log) == (CHOSEN.runner == 2)
    grown = {name: last[name] - again.get(name, 0) for name in last}
    assert first["tower_images"] >= 1
    assert first["features_misses{ram}"] == first["features_misses{disk}"] == 1
    assert again["features_saved{ram}"] == 1, "said with the next step"
    assert again["tower_images"] == first["tower_images"]
    assert grown["tower_images"] == 1, "the second picture"
    assert grown["tower_images_avoided"] == grown["features_hits{ram}"] == 1
    assert grown["features_misses{ram}"] == 1
    assert last["features_read_bytes{ram}"] > 0
    assert last["features_save_seconds{disk}"] > 0
    assert last["tower_seconds"] > first["tower_seconds"]
    records = list(read_records(path))
    sources = [[s.image.features for s in record.segments if s.image] for record in records]
    # The second prefix hit ends inside the picture.
    assert sources == [["tower"], ["encoder_cache"], ["ram", "tower"]], json.dumps(sources)
    for record in records:
        assert_whole(record)
    assert [miss.reason for miss in records[0].misses] == [Reason.NEW_CONTENT]
    told = [miss.reason for miss in records[2].misses]
    assert Reason.TEXT_DIFFERS in told, "the first picture stands behind another text"
    assert told[-1] is Reason.NEW_CONTENT, "and behind it is a second one"
    assert records[1].reused_tokens > 0
    assert (first["images_decoded"], again["images_decoded"], last["images_decoded"]) == (1, 1, 2), "lazy media"
    assert again["images_avoided"] == 1
