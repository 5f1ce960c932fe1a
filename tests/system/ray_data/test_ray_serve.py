# SPDX-License-Identifier: Apache-2.0
"""The example of replicas with Ray Serve: two tiny engines, which client asks which, counted on the replicas.

Needs `pip install '.[ray]'`.
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mmcache_tools.harness.server import CPU_ARGS, CPU_ENV, free_port, started
from mmcache_tools.zoo import build_cached

from benchmarks import probing
from benchmarks.fleet import Asked, ask, client_of
from benchmarks.servers import MODEL
from tests.system.docs.test_docs import REPO
from vllm_mmcache.client.affinity import HEADER

pytest.importorskip("ray.serve", reason="pip install '.[ray]'")
pytestmark = [pytest.mark.engine, pytest.mark.answers, pytest.mark.xdist_group("ray_data")]

NUM_IMAGES = 10
START_S = 600
BOTH_S = 120


class Service:
    """Replicas behind one address, and what each of them has done so far."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._folder = folder

    def requests(self) -> dict[str, float]:
        """By replica, since its start."""
        return self._numbers("api", "requests")

    def tower_runs(self) -> float:
        """Of both replicas."""
        return sum(self._numbers("worker", "tower_runs").values())

    def _numbers(self, process: str, what: str) -> dict[str, float]:
        number = probing.NAMES.index(what)
        return {path.name: float(np.fromfile(path)[number]) for path in self._folder.glob(f"{process}-*")}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("serve")
    model, port, probe = build_cached("qwen3-vl", folder), free_port(), folder / "probe"
    probe.mkdir()
    limits = ("--max-model-len", "2048", "--limit-mm-per-prompt", json.dumps({"image": 1}))
    command = [sys.executable, str(REPO / "examples" / "ray_serve.py"), "--replicas", "2", "--gpus", "0"]
    command += ["--port", str(port), str(model), "--served-model-name", MODEL, *CPU_ARGS, *limits, *probing.OPTIONS]
    env = {**CPU_ENV, probing.FOLDER: str(probe), "RAY_USAGE_STATS_ENABLED": "0"}
    env |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with started(command, port, log_path=folder / "log", env=env, timeout_s=START_S) as server:
        service = Service(server.url, probe)
        until_both_answer(service)
        yield service


def until_both_answer(service: Service) -> None:
    """The address answers as soon as one replica does, and the router learns of the other one a moment later."""
    client, deadline = client_of(service.url, None), time.monotonic() + BOTH_S
    while len(service.requests()) < 2 or not all(service.requests().values()):
        assert time.monotonic() < deadline, "the second replica gets no request"
        client.completions.create(model=MODEL, prompt="Hello", max_tokens=1)


def second_questions(service: Service, header: str | None, images: range) -> tuple[int, float]:
    """Ask about each image twice; how many second ones came to the replica of the first, and the tower's runs."""
    client, asked, before = client_of(service.url, header), Asked(), service.tower_runs()
    replicas: dict[tuple[int, int], str] = {}
    for question in range(2):
        for image in random.Random(question).sample(images, len(images)):  # or taking turns would meet by itself
            start = service.requests()
            ask(client, asked, image, question)
            (replicas[image, question],) = (name for name, n in service.requests().items() if n > start[name])
    assert not asked.failed
    assert len(set(replicas.values())) == 2, "both replicas work"
    same = sum(replicas[image, 0] == replicas[image, 1] for image in images)
    return same, service.tower_runs() - before


def test_with_the_header(service: Service) -> None:
    assert second_questions(service, HEADER, range(NUM_IMAGES)) == (NUM_IMAGES, NUM_IMAGES)


def test_without_the_header(service: Service) -> None:
    """The router spreads them: by chance, one in a thousand runs would not fail here."""
    same, tower_runs = second_questions(service, None, range(NUM_IMAGES, 2 * NUM_IMAGES))
    assert same < NUM_IMAGES
    assert tower_runs == 2 * NUM_IMAGES - same
