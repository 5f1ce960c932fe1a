# SPDX-License-Identifier: Apache-2.0
"""What KV events say, in the form that a router reads: vLLM's own block pool and publisher, with the hook installed."""

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockStored, KVEventBatch, ZmqEventPublisher
from vllm.utils.hashing import sha256

from tests.support.vllm_requests import Prompt, our_hasher, stored
from vllm_mmcache.base import settings
from vllm_mmcache.base.settings import Settings
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.components.identity import kv_events
from vllm_mmcache.hooking import installer
from vllm_mmcache.lifecycle.registry import KV_EVENTS

pytestmark = pytest.mark.answers

BLOCK = 4
ID = "0123456789abcdef" + "fedcba9876543210" * 3
SHORT = "0123456789abcdef" + "0" * 48
PUBLISHED_S = 10


@pytest.mark.parametrize(
    ("name", "digits"),
    [
        (SHORT, "0123456789abcdef"),
        (ID, ""),
        (SHORT.upper(), ""),
        (SHORT + "0", ""),
        (SHORT + "\n", ""),
        ("0" * 64, "0" * 16),
        ("", ""),
        (None, ""),
    ],
)
def test_marker(name: str | None, digits: str) -> None:
    assert kv_events.marker_in(name) == digits


@pytest.mark.parametrize(
    ("keys", "lora", "ids", "has_salts", "expected"),
    [
        (((ID, 3), "salt"), None, "vllm", True, ((ID, 3), "salt")),
        (((ID, 3), "salt"), None, "dynamo", True, ((SHORT, 3), "salt")),
        (([ID, -3], ["b" * 64, 0]), None, "dynamo", True, ((SHORT, -3), ("b" * 16 + "0" * 48, 0))),
        (((ID, 3), "salt"), None, "vllm", False, ((ID, 3),)),
        (("salt",), None, "vllm", False, None),
        (("l", (ID, 3), "l", b"prompt"), "l", "dynamo", False, ("l", (SHORT, 3), b"prompt")),
        ((ID, ("a name", 3)), None, "dynamo", True, (ID, ("a name", 3))),
        (None, None, "dynamo", False, None),
    ],
    ids=["as it is", "short", "two images", "no salt", "salt alone", "salt as the adapter", "other texts", "no keys"],
)
def test_published(keys: Any, lora: str | None, ids: str, has_salts: bool, expected: Any) -> None:
    assert kv_events.published([keys, None], lora, ids, has_salts) == [expected, None]


@pytest.fixture
def installed() -> Iterator[None]:
    outcome = installer.install("events", KV_EVENTS.hooks_in("engine"), vllm_version())
    assert outcome.state == "on", outcome.reason
    yield
    installer.undo("events")


Publish = Callable[[Any], Any]


@pytest.fixture
def publish() -> Iterator[Publish]:
    """Sends an event through vLLM's publisher, and returns what a subscriber got."""
    address = f"inproc://mmcache-{uuid4().hex}"  # that of a publisher before is let go of by another thread, later
    publisher = ZmqEventPublisher(0, address, topic="t")
    subscriber: Any = zmq.Context.instance().socket(zmq.SUB)
    subscriber.connect(address)
    subscriber.subscribe("t")
    subscriber.poll(200)  # a subscription is not there at once

    def sent(event: Any) -> Any:
        publisher.publish(KVEventBatch(ts=0.0, events=[event]))
        assert subscriber.poll(PUBLISHED_S * 1000), "nothing was published"
        *_, payload = subscriber.recv_multipart()
        (got,) = msgspec.msgpack.decode(payload, type=KVEventBatch).events
        return got

    yield sent
    subscriber.close(linger=0)
    publisher.shutdown()


@pytest.mark.parametrize(("ids", "has_salts"), [("vllm", True), ("dynamo", True), ("dynamo", False), ("vllm", False)])
def test_what_a_subscriber_gets(
    ids: Any, has_salts: bool, publish: Publish, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra keys alone change; the scheduler's own events do not."""
    monkeypatch.setattr(settings, "_current", Settings(kv_event_ids=ids, kv_event_salts=has_salts))
    event = stored(Prompt((1,) * 12, ((ID, 2, 7),), salt="secret"), our_hasher(BLOCK, sha256), BLOCK)
    before = event.extra_keys, event.block_hashes
    got = publish(event)
    assert (event.extra_keys, event.block_hashes) == before
    shown = SHORT if ids == "dynamo" else ID
    salts = ["secret"] if has_salts else []
    assert [list(keys) for keys in got.extra_keys] == [[[shown, 2], *salts], [[shown, -2]], [[shown, -6]]]
    assert (got.block_hashes, got.token_ids) == (event.block_hashes, event.token_ids)


def test_an_error_of_ours_loses_no_event(publish: Publish, installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(kv_events, "published", fail)
    event = stored(Prompt((1,) * 12, ((ID, 2, 7),)), our_hasher(BLOCK, sha256), BLOCK)
    got = publish(event)
    assert isinstance(event, BlockStored)
    assert got.block_hashes == event.block_hashes
