# SPDX-License-Identifier: Apache-2.0
"""Dynamo's own selection service before two of vLLM's event publishers: which of them it finds an image at.

Two replicas hold the blocks of two pictures of equal size, asked about in the same words: 6 blocks each, of which the
first is words alone. The ids of the pictures are those that our processor hooks make of Dynamo's uuids.
Needs `pip install '.[fleet]'`.
"""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mmcache_tools.harness.server import free_port, is_healthy, stop
from PIL import Image
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool

from tests.support.vllm_requests import Prompt, make_request, our_hasher
from vllm_mmcache.base import settings
from vllm_mmcache.base.settings import Settings
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.hooking import installer
from vllm_mmcache.lifecycle.registry import COMPONENTS, KV_EVENTS

llm = pytest.importorskip("dynamo.llm", reason="pip install '.[fleet]'")
pytestmark = [pytest.mark.answers, pytest.mark.process]

BLOCK = 4
TOKENS = (*range(100, 104), *(7,) * 20)
"""A block of words, and five of the picture."""
DIGESTS = (0x1234567890ABCDEF, 0xFEDCBA0987654321)
ARRIVED_S = 20


def picture(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (32, 48, 3), dtype=np.uint8))


def ids(uuids: list[str]) -> list[str]:
    """The mm_hashes of two pictures that come with these uuids."""
    items = MultiModalDataParser().parse_mm_data({"image": [picture(1), picture(2)]})
    return list(ProcessorInputs([], items, {"image": uuids}).get_mm_hashes("zoo", "blake3")["image"])


def stored(image_id: str) -> list[Any]:
    """The events of vLLM's block pool for the prompt about this picture."""
    request = make_request(Prompt(TOKENS, ((image_id, BLOCK, 20),)), our_hasher(BLOCK, sha256))
    pool = BlockPool(num_gpu_blocks=64, enable_caching=True, hash_block_size=BLOCK, enable_kv_cache_events=True)
    count = len(request.block_hashes)
    pool.cache_full_blocks(request, pool.get_new_blocks(count), 0, count, BLOCK, 0)
    return list(pool.take_events())


def asked(url: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(f"{url}/{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def about(digest: int) -> dict[str, Any]:
    """A question as Dynamo's frontend asks it, about the picture of this digest."""
    infos = [None] + [{"mm_objects": [{"mm_hash": digest, "offsets": []}]}] * 5
    hashes = llm.compute_block_hash_for_seq(list(TOKENS), BLOCK, infos)
    signed = [one - (1 << 64) if one >= 1 << 63 else one for one in hashes]
    return {"model_name": "m", "block_hashes": signed, "sequence_hashes": signed, "isl_tokens": len(TOKENS)}


Overlaps = Callable[[dict[str, Any]], dict[int, int]]


@pytest.fixture
def service() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "dynamo.select_service", "--port", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + ARRIVED_S
        while not is_healthy(url):
            assert process.poll() is None, "the selection service ended"
            assert time.monotonic() < deadline, "the selection service did not start"
            time.sleep(0.1)
        yield url
    finally:
        stop(process)


@pytest.fixture
def publish(service: str) -> Iterator[Callable[[list[str]], None]]:
    """Has replica 1 store the first picture and replica 2 the second, until the service knows of both."""
    publishers = []
    for worker in (1, 2):
        port = free_port()
        publishers.append(ZmqEventPublisher(0, f"tcp://*:{port}", topic="kv"))
        events = {"0": f"tcp://127.0.0.1:{port}"}
        more = {"data_parallel_start_rank": 0, "data_parallel_size": 1, "kv_events_endpoints": events}
        asked(service, "workers", {"worker_id": worker, "model_name": "m", "endpoint": f"http://replica-{worker}",
                                   "block_size": BLOCK, **more})  # fmt: skip

    def until_known(image_ids: list[str]) -> None:
        deadline = time.monotonic() + ARRIVED_S
        while True:
            for publisher, image_id in zip(publishers, image_ids, strict=True):  # a subscriber may come late
                publisher.publish(KVEventBatch(ts=time.time(), events=stored(image_id)))
            time.sleep(0.2)
            if all(overlaps(service, DIGESTS[0]).values()):
                return
            assert time.monotonic() < deadline, "no event arrived"

    yield until_known
    for publisher in publishers:
        publisher.shutdown()


def overlaps(url: str, digest: int) -> dict[int, int]:
    """By replica, how many blocks of the prompt about a picture the service believes to be there."""
    found = asked(url, "overlap_scores", about(digest))["workers"]
    return {one["worker_id"]: one["device_blocks"] for one in found}


@pytest.fixture(params=["vllm", "dynamo"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(settings, "_current", Settings(kv_event_ids=request.param))
    for group, hooks in (("ids", COMPONENTS["identity"].all_hooks()), ("events", KV_EVENTS.hooks_in("engine"))):
        outcome = installer.install(group, hooks, vllm_version())
        assert outcome.state == "on", outcome.reason
    yield request.param
    installer.undo("events")
    installer.undo("ids")


def test_the_replica_that_has_the_picture(form: str, publish: Callable[[list[str]], None], service: str) -> None:
    """6 of 6 blocks there and 1 of 6 elsewhere; in vLLM's form, Dynamo 1.6 sees the words alone, so 1 and 1."""
    publish(ids([f"{digest:016x}{'0' * 48}" for digest in DIGESTS]))
    whole = 6 if form == "dynamo" else 1
    for digest, holder in zip(DIGESTS, (1, 2), strict=True):
        assert overlaps(service, digest) == {holder: whole, 3 - holder: 1}
        if form == "dynamo":
            assert asked(service, "select", about(digest))["worker_id"] == holder
