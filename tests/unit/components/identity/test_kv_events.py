# SPDX-License-Identifier: Apache-2.0
"""What KV events say, in the form that a router reads: vLLM's own block pool and publisher, with the hook installed."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import BlockStored, KVEventBatch, ZmqEventPublisher
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool

from tests.support.vllm_requests import Prompt, make_request, our_hasher
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


Publish = Callable[[list[Any]], list[Any]]


@pytest.fixture
def publish() -> Iterator[Publish]:
    """Sends events through vLLM's publisher, and returns those that a subscriber got."""
    publisher = ZmqEventPublisher(0, "inproc://mmcache-events", topic="t")
    subscriber: Any = zmq.Context.instance().socket(zmq.SUB)
    subscriber.connect("inproc://mmcache-events")
    subscriber.subscribe("t")
    subscriber.poll(200)  # a subscription is not there at once

    def sent(events: list[Any]) -> list[Any]:
        publisher.publish(KVEventBatch(ts=0.0, events=events))
        assert subscriber.poll(PUBLISHED_S * 1000), "nothing was published"
        *_, payload = subscriber.recv_multipart()
        return list(msgspec.msgpack.decode(payload, type=KVEventBatch).events)

    yield sent
    subscriber.close(linger=0)
    publisher.shutdown()


def stored(prompt: Prompt) -> list[Any]:
    """The events of a prompt's full blocks, from vLLM's real block pool."""
    request = make_request(prompt, our_hasher(BLOCK, sha256))
    pool = BlockPool(num_gpu_blocks=64, enable_caching=True, hash_block_size=BLOCK, enable_kv_cache_events=True)
    count = len(request.block_hashes)
    pool.cache_full_blocks(request, pool.get_new_blocks(count), 0, count, BLOCK, 0)
    return list(pool.take_events())


@pytest.mark.parametrize(("ids", "has_salts"), [("vllm", True), ("dynamo", True), ("dynamo", False), ("vllm", False)])
def test_what_a_subscriber_gets(
    ids: Any, has_salts: bool, publish: Publish, installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra keys alone change; the scheduler's own events do not."""
    monkeypatch.setattr(settings, "_current", Settings(kv_event_ids=ids, kv_event_salts=has_salts))
    events = stored(Prompt((1,) * 12, ((ID, 2, 7),), salt="secret"))
    before = [(event.extra_keys, event.block_hashes) for event in events]
    (got,) = publish(events)
    assert [(event.extra_keys, event.block_hashes) for event in events] == before
    (event,) = events
    shown = SHORT if ids == "dynamo" else ID
    salts = ["secret"] if has_salts else []
    assert [list(keys) for keys in got.extra_keys] == [[[shown, 2], *salts], [[shown, -2]], [[shown, -6]]]
    assert (got.block_hashes, got.token_ids) == (event.block_hashes, event.token_ids)


def test_an_error_of_ours_loses_no_event(publish: Publish, installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(kv_events, "published", fail)
    events = stored(Prompt((1,) * 12, ((ID, 2, 7),)))
    (got,) = publish(events)
    assert isinstance(events[0], BlockStored)
    assert got.block_hashes == events[0].block_hashes
