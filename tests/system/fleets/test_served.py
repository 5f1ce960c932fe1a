# SPDX-License-Identifier: Apache-2.0
"""A real server whose store is a cluster, of which a primary is killed while clients ask about pictures.

No request fails, and none waits for the cluster. At the end, without any cluster, some are asked again: the answers
are those that were given while it failed over.
"""

import base64
import itertools
import re
import threading
import time
import urllib.request
from pathlib import Path

import httpx
import pytest
from mmcache_tools.harness.server import CPU_ARGS, serve
from mmcache_tools.zoo import build_cached
from openai import OpenAI

from tests.support import files
from tests.support.sizes import larger
from tests.support.tiers import LONG_S, within
from tests.system.fleets.conftest import MakeCluster
from vllm_mmcache.exactness.pictures import ellipses

pytestmark = [pytest.mark.engine, larger]

NUM_PICTURES = 24
NUM_CLIENTS = 2
WAIT_S = 1.0
TIMEOUT_S = 0.2

Answer = tuple[str, list[float]]


class Asking:
    """Clients that ask about the pictures in turn, each time after another text, so that no KV is found again."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0)
        self._pictures = [
            base64.b64encode(files.saved(ellipses(f"fleet {number}", (448, 336)), "PNG")).decode()
            for number in range(NUM_PICTURES)
        ]
        self._numbers = itertools.count()
        self.answers: dict[int, Answer] = {}
        self.waits: list[tuple[float, float]] = []
        """When a request was answered, and its seconds."""
        self.failed: list[str] = []

    def ask(self, number: int) -> Answer:
        picture = self._pictures[number % NUM_PICTURES]
        parts = [
            {"type": "text", "text": f"Number {number}."},
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
            {"type": "text", "text": "What is this?"},
        ]
        answer = self._client.chat.completions.create(
            model="zoo",
            messages=[{"role": "user", "content": parts}],  # type: ignore[list-item, misc]
            max_tokens=4,
            temperature=0,
            logprobs=True,
        ).choices[0]
        assert answer.logprobs is not None
        return str(answer.message.content), [one.logprob for one in answer.logprobs.content or ()]

    def go_on(self, ended: threading.Event) -> None:
        while not ended.is_set():
            number = next(self._numbers)
            before = time.monotonic()
            try:
                self.answers[number] = self.ask(number)
            except Exception as error:
                self.failed.append(repr(error))
            now = time.monotonic()
            self.waits.append((now, now - before))

    def hits(self) -> float:
        with urllib.request.urlopen(f"{self._url}/metrics") as page:
            text = page.read().decode()
        found = re.findall(r'^mmcache:features_hits_total\{[^}]*tier="remote"[^}]*\} (\S+)$', text, re.M)
        return sum(map(float, found))


def test_a_failover_while_clients_ask(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = make_cluster(3, 1)
    env = {
        "MMCACHE_STORE": cluster.url,
        "MMCACHE_STORE_REMOTE_TIMEOUT_S": str(TIMEOUT_S),
        "MMCACHE_STORE_WAIT_S": str(WAIT_S),
        "MMCACHE_FEATURE_RAM_BYTES": "0",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    # vLLM's own encoder cache has room for a few pictures alone.
    few = ("--max-model-len", "1024", "--max-num-batched-tokens", "512")
    args = (*CPU_ARGS, "--served-model-name", "zoo", "--enable-prefix-caching", *few)
    model = build_cached("qwen3-vl", tmp_path / "zoo")
    with serve(model, log_path=tmp_path / "log", env=env, args=args) as server:
        asking, ended = Asking(server.url), threading.Event()
        clients = [threading.Thread(target=asking.go_on, args=(ended,)) for _ in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        try:
            assert within(LONG_S, lambda: len(asking.waits) >= 3 * NUM_PICTURES and asking.hits() >= NUM_PICTURES)
            begun, killed = len(asking.waits), time.monotonic()
            cluster.primaries[0].kill()
            assert within(LONG_S, cluster.is_whole)
            whole, hits = time.monotonic(), asking.hits()
            assert within(LONG_S, lambda: asking.hits() >= hits + 2 * NUM_PICTURES)
        finally:
            ended.set()
            for client in clients:
                client.join()
        before = sorted(seconds for at, seconds in asking.waits[NUM_PICTURES:begun])
        after = sorted(seconds for at, seconds in asking.waits[begun:])
        print(
            f"\nserved from a cluster, failover {whole - killed:.1f} s: {len(asking.waits)} requests, "
            f"{len(asking.failed)} failed; median and longest "
            f"before: {before[len(before) // 2]:.3f}, {before[-1]:.3f} s; "
            f"since: {after[len(after) // 2]:.3f}, {after[-1]:.3f} s"
        )
        cluster.kill()
        for cache in ("prefix", "mm", "encoder"):
            httpx.post(f"{server.url}/reset_{cache}_cache", timeout=60).raise_for_status()
        again = list(asking.answers)[begun : begun + 2 * NUM_PICTURES]
        cold = {number: asking.ask(number) for number in again}
    log = (tmp_path / "log").read_text()
    assert not asking.failed
    assert after[-1] - before[-1] < WAIT_S + 0.5
    for number, (text, logprobs) in cold.items():
        assert (text, logprobs) == (asking.answers[number][0], pytest.approx(asking.answers[number][1], abs=1e-3))
    assert f"node 127.0.0.1:{cluster.primaries[0].port} is off" in log
    assert "Traceback" not in log
