# SPDX-License-Identifier: Apache-2.0
"""Servers that are dead, silent, slow, or no Redis at all: a miss in time, one line in the log, and no password in it.

Several nodes are in tests/system/fleets.
"""

import socket
import time
from collections.abc import Callable

import pytest
import redis

from tests.support.packages import LARGE, features, load, packed, redis_tier, save
from tests.support.redis_faults import refusing, remote_tier, server_that, trickling
from tests.support.store_server import TIMEOUT_S, Server
from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.components.features.tiers import FEATURES
from vllm_mmcache.storage.frame import frame, key
from vllm_mmcache.storage.kind import Kind
from vllm_mmcache.storage.record_store import RECORDS
from vllm_mmcache.storage.redis_backend import RedisBackend
from vllm_mmcache.storage.tier import Tier

KEY = key("a")
VALUE = b"v" * 60_000
KINDS = pytest.mark.parametrize("kind", [FEATURES, RECORDS], ids=["features", "records"])


def put(tier: Tier) -> None:
    """As its kind is put."""
    if tier.kind is FEATURES:
        assert not save(tier, 0)
    else:
        tier.put_many({KEY: b"value"})


def found(tier: Tier, seconds: float = 60) -> bytes | None:
    if tier.kind is FEATURES:
        return load(tier, 0, seconds=seconds)
    hit = tier.get(KEY, bytes)
    return None if hit is None else hit[1]


def counts(tier: Tier, *names: str) -> list[float]:
    return [tier.counts.snapshot()[name] for name in names]


@KINDS
def test_dead_server(kind: Kind) -> None:
    with refusing() as url:
        tier = remote_tier(url, kind, rest_s=1000)
        for _ in range(100):
            assert found(tier) is None
            put(tier)
    assert counts(tier, "misses", "errors", "dropped", "saved") == [100, 2, 100, 0]  # each was tried once


@KINDS
@pytest.mark.slow
def test_a_silent_server_costs_one_timeout_and_is_left_alone(kind: Kind, log: pytest.LogCaptureFixture) -> None:
    with server_that(lambda connection: time.sleep(60)) as url:
        tier = remote_tier(url, kind, rest_s=1000)
        start = time.perf_counter()
        assert found(tier) is None
        assert time.perf_counter() - start >= 0.02
        for _ in range(100):
            assert found(tier) is None
            put(tier)
        assert time.perf_counter() - start < 60  # by then the server would have closed the first connection
    assert counts(tier, "misses", "errors", "dropped") == [101, 2, 100]
    assert len(log.messages) == 2  # reading, writing


STORED = {FEATURES.name: packed(), RECORDS.name: frame(KEY, VALUE)}
EXPECTED = {FEATURES.name: features(), RECORDS.name: VALUE}


@KINDS
@pytest.mark.slow
def test_a_trickle_is_left_alone_after_one_entry(kind: Kind, log: pytest.LogCaptureFixture) -> None:
    """Bytes come before each timeout is over, but too few. The control: the same ones, at once."""
    with server_that(trickling(STORED[kind.name], 100, 0.1)) as url:
        tier = remote_tier(url, kind, TIMEOUT_S, rest_s=1000)
        assert isinstance(tier.backend, RedisBackend)
        tier.backend._slow_s = 2.0  # as with a timeout of 0.2 s, which a busy machine may reach between two parts
        assert found(tier) is None
        assert found(tier) is None
    assert counts(tier, "hits", "misses", "errors") == [0, 2, 1]
    assert "bytes took" in log.text
    with server_that(trickling(STORED[kind.name], 10_000, 0)) as url:
        assert found(remote_tier(url, kind, TIMEOUT_S)) == EXPECTED[kind.name]


@pytest.mark.slow
def test_a_slow_server_is_bounded_by_the_time_given(log: pytest.LogCaptureFixture) -> None:
    """Also within a piece, which takes 32 s. It is not left alone for that: others decide whether it is of use."""
    with server_that(trickling(packed(0, LARGE), 64 * 1024, 0.5)) as url:
        tier = remote_tier(url, timeout_s=TIMEOUT_S)
        start = time.monotonic()
        assert load(tier, 0, LARGE, seconds=2) is None
        assert 2 <= time.monotonic() - start < 30
        assert counts(tier, "misses", "errors", "set_aside") == [1, 1, 0]
        assert not tier.is_open()
    with server_that(trickling(packed(0, LARGE), 64 * 1024, 0.001)) as url:
        assert load(remote_tier(url, timeout_s=TIMEOUT_S), 0, LARGE) == features(0, LARGE)
    assert not log.messages


@pytest.mark.parametrize(
    ("answer", "is_late"),
    [(b"-NOPERM\r\n", False), (b"", False), (b":1\r\n", True), (b"$5\r\nhello\r\n", False)],
    ids=["refused", "silent", "late", "no answer to that"],
)
def test_no_expiry_is_no_reason_for_a_miss(answer: bytes, is_late: bool) -> None:
    """What was read is served, whatever becomes of marking it as used; an answer that is late is nobody's."""
    with server_that(trickling(packed(), 10_000, 0, answer, is_late)) as url:
        tier = remote_tier(url, timeout_s=0.5)
        assert [found(tier) for _ in range(3)] == [features()] * 3
    assert counts(tier, "hits", "errors") == [3, 0]


@KINDS
@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$x\r\n", b"*-5\r\n", b"\xff" * 64, b"$5\r\nab", b"x" * 5000, b""],
    ids=["http", "length", "array", "binary", "cut", "endless", "closed"],
)
def test_no_redis_at_all(kind: Kind, answer: bytes) -> None:
    def say(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(answer * 10)

    with server_that(say) as url:
        tier = remote_tier(url, kind)
        assert found(tier) is None
        put(tier)
    assert counts(tier, "misses", "errors", "dropped") == [1, 2, 1]  # reading, writing


def wrong_answers(stored: bytes) -> dict[str, Callable[[bytes], bytes]]:
    """What a server may answer to GETRANGE, by the request."""
    return {
        "more than asked": lambda request: b"$%d\r\n%s\r\n" % (len(stored) + 9, stored + b"x" * 9),
        "more than it said": lambda request: b"$%d\r\n%s" % (len(stored), stored + b"x\r\n"),
        "a number": lambda request: b":5\r\n",
        "nothing": lambda request: b"$-1\r\n",
        "an error": lambda request: b"-ERR nothing of yours\r\n",
    }


@pytest.mark.parametrize("how", wrong_answers(b""))
def test_an_answer_that_is_none(how: str) -> None:
    stored = frame(KEY, b"value")

    def answer(connection: socket.socket) -> None:
        while request := connection.recv(4096):
            if b"STRLEN" in request:
                connection.sendall(b":%d\r\n" % len(stored))
            elif b"GETRANGE" in request:
                connection.sendall(wrong_answers(stored)[how](request))
            else:
                connection.sendall(b"+OK\r\n" * request.count(b"*"))

    with server_that(answer) as url:
        tier = remote_tier(url, RECORDS, timeout_s=0.5)
        assert found(tier) is None
        assert tier.is_open()
    assert counts(tier, "hits", "errors") == [0, 1]


@KINDS
def test_a_password_is_not_said(kind: Kind, log: pytest.LogCaptureFixture) -> None:
    with refusing() as url:
        tier = remote_tier(url.replace("//", "//user:secret@"), kind)
        assert found(tier) is None
        put(tier)
    assert log.text.count("is off") == 2
    assert "127.0.0.1" in log.text
    assert "secret" not in log.text + tier.where
    for wrong in ("redis://user:secret@host/not-a-number?bogus=1", "redis://user:secret@host:1?no_such_option=1"):
        with pytest.raises(SettingsError) as error:
            remote_tier(wrong, kind)
        assert "secret" not in str(error.value)


def test_a_server_that_wants_a_password(server: Server) -> None:
    server.client.config_set("requirepass", "secret")
    try:
        tier = remote_tier(server.url, timeout_s=TIMEOUT_S)
        assert load(tier, 0) is None
        assert counts(tier, "errors") == [1]
        allowed = redis_tier(server.url.replace("//", "//:secret@"), timeout_s=TIMEOUT_S)
        assert save(allowed, 0)
        assert load(allowed, 0) == features(0)
    finally:
        redis.Redis.from_url(server.url, password="secret").config_set("requirepass", "")
