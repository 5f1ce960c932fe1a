# SPDX-License-Identifier: Apache-2.0
"""Records in Redis or Valkey: shared, expiring, checked, and never waited for long."""

import socket
import time

import pytest
from vllm_mmcache.storage.records import MAX_VALUE_BYTES
from vllm_mmcache.storage.records.ram import Entry
from vllm_mmcache.storage.records.remote import PREFIX, RemotePlace

from tests.support.store_server import TIMEOUT_S, Server
from tests.support.tiers import LONG_S
from tests.system.storage.features.test_remote import server_that, trickling
from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.storage import records
from vllm_mmcache.storage.frame import frame

KEY, OTHER = (records.key("test", name) for name in "ab")
NAME = PREFIX + KEY.hex()


def place_at(url: str, timeout_s: float = TIMEOUT_S, rest_s: float = 5.0) -> RemotePlace:
    return RemotePlace(url, ttl_s=100, timeout_s=timeout_s, rest_s=rest_s)


def value_of(entry: Entry | None) -> bytes | None:
    return entry and entry.value


@pytest.mark.parametrize("value", [b"", b"value", b"v" * MAX_VALUE_BYTES])
def test_replicas_share(server: Server, value: bytes) -> None:
    place_at(server.url).save({KEY: value})
    replica = place_at(server.url)
    assert value_of(replica.get(KEY)) == value
    assert replica.get(OTHER) is None
    assert 90 < server.client.ttl(NAME) <= 100
    counts = replica.counts.snapshot()
    assert (counts["hits"], counts["misses"], counts["errors"]) == (1, 1, 0)


def test_a_hit_is_for_another_while(server: Server, tmp_path: object) -> None:
    """A record that came from there is written again: it is used, so it must not expire."""
    place_at(server.url).save({KEY: b"value"})
    server.client.expire(NAME, 60)
    replica = records.Records(1 << 20, [place_at(server.url)])
    for _ in range(3):
        assert replica.get(KEY) == b"value"
    assert replica.flush(LONG_S)
    assert server.client.ttl(NAME) > 90
    assert replica.counts()["remote"]["saved"] == 1
    replica.close()


@pytest.mark.parametrize(
    "planted",
    [
        frame(OTHER, b"value"),
        frame(KEY, b"value")[:-1],
        b"mmcr\x00" + frame(KEY, b"value")[5:],
        b"garbage",
        b"x" * 10 * MAX_VALUE_BYTES,
        frame(KEY, b"v" * (MAX_VALUE_BYTES + 1)),
    ],
)
def test_what_is_no_whole_record_of_the_key_is_a_miss(server: Server, planted: bytes) -> None:
    place = place_at(server.url)
    server.client.set(NAME, planted)
    assert place.get(KEY) is None
    assert (place.counts.snapshot()["corrupt"], place.counts.snapshot()["errors"]) == (1, 0)
    place.save({KEY: b"value"})
    assert value_of(place.get(KEY)) == b"value"


def test_an_entry_of_another_type(server: Server) -> None:
    server.client.rpush(NAME, "a", "b")
    place = place_at(server.url)
    assert place.get(KEY) is None
    place.save({KEY: b"value"})
    assert value_of(place.get(KEY)) == b"value"
    assert place.counts.snapshot()["errors"] == 0


@pytest.mark.slow
def test_silent_server_costs_one_timeout_and_is_left_alone() -> None:
    with server_that(lambda connection: time.sleep(60)) as url:
        place = place_at(url, timeout_s=0.02, rest_s=1000)
        assert place.get(KEY) is None
        place.save({KEY: b"value"})
        for _ in range(1000):
            assert place.get(KEY) is None
            place.save({KEY: b"value"})
    counts = place.counts.snapshot()
    assert (counts["misses"], counts["errors"], counts["dropped"]) == (1001, 2, 1001)


@pytest.mark.slow
def test_a_trickle_is_given_up() -> None:
    framed = frame(KEY, b"v" * 60_000)
    with server_that(trickling(framed, 100, 0.05)) as url:
        place = place_at(url, timeout_s=0.1)
        assert place.get(KEY) is None
        assert place.counts.snapshot()["errors"] == 1
    with server_that(trickling(framed, 10_000, 0)) as url:  # the control
        assert value_of(place_at(url).get(KEY)) == b"v" * 60_000


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$x\r\n", b"*-5\r\n", b"\xff" * 64, b""])
def test_no_redis_at_all(answer: bytes) -> None:
    def say(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(answer * 10)

    with server_that(say) as url:
        place = place_at(url)
        assert place.get(KEY) is None
        place.save({KEY: b"value"})
    assert place.counts.snapshot()["errors"] == 2


def test_it_is_used_again_when_it_is_back(server: Server) -> None:
    place = place_at(server.url, rest_s=0.0)
    place.save({KEY: b"value"})
    server.kill()
    try:
        assert place.get(KEY) is None
        place.save({KEY: b"value"})
    finally:
        server.start()
    assert place.get(KEY) is None
    place.save({KEY: b"value"})
    assert value_of(place.get(KEY)) == b"value"


def test_a_wrong_url_shows_no_password() -> None:
    with pytest.raises(SettingsError) as raised:
        place_at("redis://user:secret@host:1?no_such_option=1")
    assert "secret" not in str(raised.value)
