# SPDX-License-Identifier: Apache-2.0
"""Dynamo's own selection service before two of vLLM's event publishers: which of them it finds an image at.

Two replicas hold the blocks of two pictures of equal size, asked about in the same words: 6 blocks each, of which the
first is words alone. The ids of the pictures are those that our processor hooks make of Dynamo's uuids.
Needs `pip install '.[fleet]'`.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mmcache_tools.harness.server import Server, free_port
from PIL import Image
from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.utils.hashing import sha256

from benchmarks import dynamo
from tests.support.vllm_requests import Prompt, our_hasher, stored
from vllm_mmcache.base import settings
from vllm_mmcache.base.settings import Settings
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.hooking import installer
from vllm_mmcache.lifecycle.registry import COMPONENTS, KV_EVENTS

pytest.importorskip("dynamo.llm", reason="pip install '.[fleet]'")
pytestmark = [pytest.mark.answers, pytest.mark.process]

BLOCK = 4
PICTURE = 7
TOKENS = (*range(100, 104), *(PICTURE,) * 20)
"""A block of words, and five of the picture."""
DIGESTS = (0x1234567890ABCDEF, 0xFEDCBA0987654321)
ARRIVED_S = 20


def picture(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (32, 48, 3), dtype=np.uint8))


def ids(uuids: list[str]) -> list[str]:
    """The mm_hashes of two pictures that come with these uuids."""
    items = MultiModalDataParser().parse_mm_data({"image": [picture(1), picture(2)]})
    return list(ProcessorInputs([], items, {"image": uuids}).get_mm_hashes("zoo", "blake3")["image"])


def about(digest: int) -> dict[str, Any]:
    """The question about the picture of this digest."""
    return dynamo.prompt_of(TOKENS, BLOCK, PICTURE, digest)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Server]:
    with dynamo.selection(tmp_path / "log") as service:
        yield service


@pytest.fixture
def publish(service: Server) -> Iterator[Callable[[list[str]], None]]:
    """Has replica 1 store the first picture and replica 2 the second, until the service knows of both."""
    publishers = []
    for number in (1, 2):
        port = free_port()
        publishers.append(ZmqEventPublisher(0, f"tcp://*:{port}", topic="kv"))
        dynamo.add_replica(service, number, port, BLOCK)

    def until_known(image_ids: list[str]) -> None:
        events = [
            stored(Prompt(TOKENS, ((image_id, BLOCK, 20),)), our_hasher(BLOCK, sha256), BLOCK) for image_id in image_ids
        ]
        deadline = time.monotonic() + ARRIVED_S
        while True:
            for publisher, event in zip(publishers, events, strict=True):  # a subscriber may come late
                publisher.publish(KVEventBatch(ts=time.time(), events=[event]))
            time.sleep(0.2)
            if all(dynamo.overlaps(service, about(DIGESTS[0])).values()):
                return
            assert time.monotonic() < deadline, "no event arrived"

    yield until_known
    for publisher in publishers:
        publisher.shutdown()


@pytest.fixture(params=["vllm", "dynamo"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(settings, "_current", Settings(kv_event_ids=request.param))
    for group, hooks in (("ids", COMPONENTS["identity"].all_hooks()), ("events", KV_EVENTS.hooks_in("engine"))):
        outcome = installer.install(group, hooks, vllm_version())
        assert outcome.state == "on", outcome.reason
    yield request.param
    installer.undo("events")
    installer.undo("ids")


def test_the_replica_that_has_the_picture(form: str, publish: Callable[[list[str]], None], service: Server) -> None:
    """6 of 6 blocks there and 1 of 6 elsewhere; in vLLM's form, Dynamo 1.6 sees the words alone, so 1 and 1."""
    publish(ids([dynamo.uuid_of(digest) for digest in DIGESTS]))
    whole = 6 if form == "dynamo" else 1
    for digest, holder in zip(DIGESTS, (1, 2), strict=True):
        assert dynamo.overlaps(service, about(digest)) == {holder: whole, 3 - holder: 1}
        if form == "dynamo":
            assert dynamo.chosen(service, about(digest)) == holder
