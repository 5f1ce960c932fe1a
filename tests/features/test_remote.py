# SPDX-License-Identifier: Apache-2.0
"""The remote tier against a real server, and against servers that are dead, slow, or no Redis at all."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import redis

from tests.features.conftest import Server
from tests.features.packages import identity, package, same
from vllm_mmcache.errors import SettingsError
from vllm_mmcache.features.package import pack
from vllm_mmcache.features.remote import PREFIX, RemoteTier

MAX_BYTES = 1024**2


def tier_at(url: str, rest_s: float = 5.0, timeout_s: float = 0.02) -> RemoteTier:
    return RemoteTier(url, ttl_s=100, max_bytes=MAX_BYTES, timeout_s=timeout_s, rest_s=rest_s)


def patient(server: Server) -> RemoteTier:
    """A tier whose timeout a busy test machine does not reach."""
    return tier_at(server.url, timeout_s=1)


def save(tier: RemoteTier, number: int) -> None:
    tier.save(identity(number).key, pack(identity(number), package(number)))


@contextmanager
def server_that(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of a TCP server that treats each connection with `answer`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                threading.Thread(target=treat, args=(connection,), daemon=True).start()

        def treat(connection: socket.socket) -> None:
            with connection:
                try:
                    answer(connection)
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        yield f"redis://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("scheme", ["redis", "valkey"])
def test_replicas_share(server: Server, scheme: str) -> None:
    save(patient(server), 0)
    other = tier_at(server.url.replace("redis", scheme, 1), timeout_s=1)
    assert other.has(identity(0))
    assert same(other.load(identity(0)), package(0))
    assert not other.has(identity(1))
    assert other.load(identity(1)) is None
    counts = other.counters.snapshot()
    assert (counts["hits"], counts["misses"], counts["errors"]) == (1, 1, 0)
    assert counts["load_s"] > 0


def test_entries_expire_and_have_a_limit(server: Server) -> None:
    tier = patient(server)
    save(tier, 0)
    (entry,) = server.client.keys("*")
    assert entry.decode() == PREFIX + identity(0).key
    assert 90 < server.client.ttl(entry) <= 100
    large = pack(identity(1), package(1, num_tokens=4096, hidden=256))
    tier.save(identity(1).key, large)
    assert tier.counters.snapshot()["dropped"] == 1
    # Another replica may have a larger limit: a miss here, and its entry stays.
    server.client.set(PREFIX + identity(1).key, large)
    assert tier.load(identity(1)) is None
    assert server.client.exists(PREFIX + identity(1).key)
    assert tier.counters.snapshot()["set_aside"] == 0


@pytest.mark.parametrize("garbage", ["bytes", "list", "another", "truncated"])
def test_garbage_is_a_miss_and_deleted(server: Server, garbage: str) -> None:
    key = PREFIX + identity(0).key
    packed = pack(identity(0), package(0))
    if garbage == "list":
        server.client.rpush(key, "x")
    else:
        other = pack(identity(1), package(0))
        server.client.set(key, {"bytes": b"garbage" * 1000, "another": other, "truncated": packed[:-1]}[garbage])
    tier = patient(server)
    assert tier.load(identity(0)) is None
    assert not server.client.exists(key)
    counts = tier.counters.snapshot()
    assert (counts["hits"], counts["misses"], counts["set_aside"], counts["errors"]) == (0, 1, 1, 0)
    save(tier, 0)
    assert same(tier.load(identity(0)), package(0))


def test_killed_and_started_again_under_load(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vllm.mmcache")
    tier = tier_at(server.url, rest_s=0.1, timeout_s=1)
    stop = threading.Event()
    wrong: list[int] = []
    longest: list[float] = []

    def work(start: int) -> None:
        number = start
        while not stop.is_set():
            number = (number + 1) % 50
            before = time.perf_counter()
            found = tier.load(identity(number))
            longest.append(time.perf_counter() - before)
            if found is None:
                save(tier, number)
            elif not same(found, package(number)):
                wrong.append(number)

    def hits_within_10_s(hits: float) -> bool:
        until = time.monotonic() + 10
        while tier.counters.snapshot()["hits"] < hits and time.monotonic() < until:
            time.sleep(0.01)
        return tier.counters.snapshot()["hits"] >= hits

    threads = [threading.Thread(target=work, args=(start,)) for start in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert hits_within_10_s(20)
        server.kill()
        time.sleep(0.5)
        hits = tier.counters.snapshot()["hits"]
        server.start()
        assert hits_within_10_s(hits + 20)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert max(longest) < 1.5
    assert ["is off" in caplog.messages[0], "works again" in caplog.messages[-1]] == [True, True]
    assert len(caplog.messages) == 2


def test_silent_server_costs_one_timeout_and_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with server_that(lambda connection: time.sleep(60)) as url:
        tier = tier_at(url)
        start = time.perf_counter()
        assert tier.load(identity(0)) is None
        first = time.perf_counter() - start
        start = time.perf_counter()
        for number in range(100):
            assert tier.load(identity(number)) is None
            assert not tier.has(identity(number))
            save(tier, number)
        rest = time.perf_counter() - start
    assert 0.02 <= first < 0.3  # 20 ms, and what a busy machine adds
    assert rest < 0.3
    counts = tier.counters.snapshot()
    assert (counts["misses"], counts["errors"], counts["dropped"]) == (101, 1, 100)
    assert len(caplog.messages) == 1


def test_slow_server_is_left_alone_after_one_package(caplog: pytest.LogCaptureFixture) -> None:
    packed = pack(identity(0), package(0))

    def trickle(connection: socket.socket) -> None:
        while request := connection.recv(4096):
            if b"GETRANGE" not in request:
                connection.sendall(b"+OK\r\n" * request.count(b"*"))
                continue
            connection.sendall(b"$%d\r\n" % len(packed))
            for start in range(0, len(packed), len(packed) // 30):
                time.sleep(0.05)
                connection.sendall(packed[start : start + len(packed) // 30])
            connection.sendall(b"\r\n")

    with server_that(trickle) as url:
        tier = tier_at(url, timeout_s=0.1)
        assert same(tier.load(identity(0)), package(0))
        assert tier.load(identity(0)) is None
    counts = tier.counters.snapshot()
    assert (counts["hits"], counts["misses"], counts["errors"]) == (1, 1, 1)
    assert "bytes took" in caplog.text


def test_dead_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"redis://127.0.0.1:{taken.getsockname()[1]}"
    tier = tier_at(url)
    start = time.perf_counter()
    for number in range(100):
        assert tier.load(identity(number)) is None
    assert time.perf_counter() - start < 0.3
    assert tier.counters.snapshot()["errors"] == 1


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$x\r\n", b"*-5\r\n", b"\xff" * 64, b"$5\r\nab", b""],
    ids=["http", "length", "array", "binary", "cut", "closed"],
)
def test_no_redis_at_all(answer: bytes) -> None:
    def say(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(answer * 10)

    with server_that(say) as url:
        tier = tier_at(url)
        assert tier.load(identity(0)) is None
        save(tier, 0)
        assert tier.counters.snapshot()["errors"] == 1


def test_the_rest_doubles() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"redis://127.0.0.1:{taken.getsockname()[1]}"
    tier = tier_at(url, rest_s=0.05)
    until = time.monotonic() + 1
    while time.monotonic() < until:
        tier.load(identity(0))
    assert tier.counters.snapshot()["errors"] == 5  # at 0, 0.05, 0.15, 0.35 and 0.75 s


def test_a_password_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"redis://user:secret@127.0.0.1:{taken.getsockname()[1]}"
    assert tier_at(url).load(identity(0)) is None
    assert "is off" in caplog.text
    assert "secret" not in caplog.text
    with pytest.raises(SettingsError) as error:
        tier_at("redis://user:secret@host/not-a-number?bogus=1")
    assert "secret" not in str(error.value)


def test_a_server_that_wants_a_password(server: Server) -> None:
    server.client.config_set("requirepass", "secret")
    try:
        tier = patient(server)
        assert tier.load(identity(0)) is None
        assert tier.counters.snapshot()["errors"] == 1
        allowed = tier_at(server.url.replace("//", "//:secret@"), timeout_s=1)
        save(allowed, 0)
        assert same(allowed.load(identity(0)), package(0))
    finally:
        redis.Redis.from_url(server.url, password="secret").config_set("requirepass", "")
