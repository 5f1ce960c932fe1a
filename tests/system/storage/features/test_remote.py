# SPDX-License-Identifier: Apache-2.0
"""The remote tier against a real server, and against servers that are dead, slow, or no Redis at all."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import redis
from vllm_mmcache.components.features.lasting import PIECE_BYTES
from vllm_mmcache.components.features.remote import INCOMING, INCOMING_TTL_S, PREFIX, RemoteTier

from tests.support.packages import SHAPE, features, identity, load, packed, save
from tests.support.store_server import TIMEOUT_S, Server
from tests.support.tiers import LONG_S, within
from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.components.features.package import Shape, pack
from vllm_mmcache.storage.redis_nodes import Value

MAX_BYTES = 32 * 1024**2
KINDS = ("(reading)", "(writing)")
LARGE = Shape(4096, 1536, "bfloat16")  # three pieces


def tier_at(url: str, rest_s: float = 5.0, timeout_s: float = 0.02) -> RemoteTier:
    return RemoteTier(url, ttl_s=100, max_bytes=MAX_BYTES, timeout_s=timeout_s, rest_s=rest_s)


def patient(server: Server, rest_s: float = 5.0) -> RemoteTier:
    """A tier whose timeout a busy test machine does not reach."""
    return tier_at(server.url, rest_s, TIMEOUT_S)


@contextmanager
def refusing() -> Iterator[str]:
    """The URL of a port where nobody listens, nor will while the test runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"redis://127.0.0.1:{taken.getsockname()[1]}"


@contextmanager
def server_that(answer: Callable[[socket.socket], object]) -> Iterator[str]:
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
    other = tier_at(server.url.replace("redis", scheme, 1), timeout_s=TIMEOUT_S)
    assert load(other, 0) == features(0)
    assert load(other, 1) is None
    counts = other.counters.snapshot()
    assert (counts["hits"], counts["misses"], counts["errors"]) == (1, 1, 0)
    assert counts["load_s"] > 0


def test_entries_expire_and_have_a_limit(server: Server) -> None:
    tier = patient(server)
    save(tier, 0)
    (entry,) = server.client.keys("*")
    assert entry.decode() == PREFIX + identity(0).key
    assert 90 < server.client.ttl(entry) <= 100
    too_large = Shape(4097, 2048, "float32")
    assert not save(tier, 1, too_large)
    assert tier.counters.snapshot()["dropped"] == 1
    # Another replica may have a larger limit: a miss here, and its entry stays.
    server.client.set(PREFIX + identity(1).key, packed(1, too_large))
    assert load(tier, 1, too_large) is None
    assert server.client.exists(PREFIX + identity(1).key)
    assert tier.counters.snapshot()["set_aside"] == 0


def test_eighty_mebibytes_in_pieces(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """No command and no answer has more than one piece, so that the server is there for others in between."""
    shape = Shape(16384, 2560, "bfloat16")
    tier = RemoteTier(server.url, ttl_s=100, max_bytes=512 * 1024**2, timeout_s=TIMEOUT_S)
    send, sent = redis.Connection.send_packed_command, []
    with monkeypatch.context() as patch:
        patch.setattr(
            redis.Connection,
            "send_packed_command",
            lambda self, command, **other: (sent.append(sum(map(len, command))), send(self, command, **other))[1],
        )
        assert save(tier, 0, shape)
    assert PIECE_BYTES < max(sent) < PIECE_BYTES + 1000
    asked: list[int] = []
    with monkeypatch.context() as patch:
        between(patch, asked.append)
        assert load(tier, 0, shape) == features(0, shape)
    assert max(later - before for before, later in pairwise(asked)) == PIECE_BYTES
    assert server.client.get(PREFIX + identity(0).key) == packed(0, shape)
    assert server.client.dbsize() == 1


def test_a_package_that_is_there_is_not_sent_again(server: Server) -> None:
    tier = patient(server)
    save(tier, 0)
    server.client.expire(PREFIX + identity(0).key, 60)
    assert save(tier, 0)
    assert server.client.ttl(PREFIX + identity(0).key) > 90
    assert tier.counters.snapshot()["saved"] == 1


GARBAGE = {
    "bytes": b"garbage" * 1000,
    "another": pack(identity(1), SHAPE, features()),
    "another shape": packed(0, Shape(16, 32, "float32")),
    "truncated": packed()[:-1],
    "longer": packed() + b"x",
    "bit flipped": packed()[:-1] + bytes([packed()[-1] ^ 1]),
    "long header": (2**20 + 8).to_bytes(8, "little") + b"{" * 2**21,
    "list": b"",
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_is_a_miss_and_deleted(server: Server, garbage: str) -> None:
    key = PREFIX + identity(0).key
    if garbage == "list":
        server.client.rpush(key, "x")
    else:
        server.client.set(key, GARBAGE[garbage])
    tier = patient(server)
    assert load(tier, 0) is None
    assert not server.client.exists(key)
    counts = tier.counters.snapshot()
    assert (counts["hits"], counts["misses"], counts["set_aside"], counts["errors"]) == (0, 1, 1, 0)
    save(tier, 0)
    assert load(tier, 0) == features(0)


def between(monkeypatch: pytest.MonkeyPatch, what: Callable[[int], object]) -> None:
    """Run `what` before each read of a value, with the offset."""
    read_into = Value.read_into

    def instead(self: Value, offset: int, buffer: memoryview, until: float) -> None:
        what(offset)
        read_into(self, offset, buffer, until)

    monkeypatch.setattr(Value, "read_into", instead)


@pytest.mark.parametrize("how", ["replaced", "removed", "shortened"])
def test_an_entry_that_changes_while_it_is_read(server: Server, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A miss; and what another replica has put there meanwhile stays."""
    tier = patient(server)
    save(tier, 0, LARGE)
    key = PREFIX + identity(0).key
    new = pack(identity(0), LARGE, features(1, LARGE))
    changes = {
        "replaced": lambda: server.client.set(key, new),
        "removed": lambda: server.client.delete(key),
        "shortened": lambda: server.client.set(key, packed(0, LARGE)[: 2 * PIECE_BYTES]),
    }
    with monkeypatch.context() as patch:
        between(patch, lambda offset: changes[how]() if offset > PIECE_BYTES else None)
        assert load(tier, 0, LARGE) is None
    counts = tier.counters.snapshot()
    assert (counts["misses"], counts["set_aside"], counts["errors"]) == (1, 0, 0)
    assert load(tier, 0, LARGE) == (features(1, LARGE) if how == "replaced" else None)
    assert tier.counters.snapshot()["set_aside"] == (how == "shortened")


def test_a_server_killed_between_pieces_of_a_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = patient(server, rest_s=0)
    save(tier, 0, LARGE)
    try:
        with monkeypatch.context() as patch:
            between(patch, lambda offset: server.kill() if offset > PIECE_BYTES else None)
            assert load(tier, 0, LARGE) is None
    finally:
        server.start()
    assert tier.counters.snapshot()["errors"] == 1
    save(tier, 0, LARGE)
    assert load(tier, 0, LARGE) == features(0, LARGE)


def after_piece(monkeypatch: pytest.MonkeyPatch, number: int, what: Callable[[], object]) -> None:
    """Run `what` once, when so many pieces of a package were sent: the head is the first."""
    sent: list[object] = []
    execute: Any = redis.client.Pipeline.execute

    def instead(self: redis.client.Pipeline, *args: object) -> object:
        answer = execute(self, *args)
        sent.append(answer)
        if len(sent) == number:
            what()
        return answer

    monkeypatch.setattr(redis.client.Pipeline, "execute", instead)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_server_killed_between_pieces_of_a_write(
    server: Server, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = patient(server, rest_s=0)
    try:
        with monkeypatch.context() as patch:
            after_piece(patch, number, server.kill)
            assert not save(tier, 0, LARGE)
    finally:
        server.start()
    assert tier.counters.snapshot()["errors"] == 1
    assert save(tier, 0, LARGE)
    assert load(tier, 0, LARGE) == features(0, LARGE)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_pieces_that_go_while_others_are_written(server: Server, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full server may evict what lies there, the unfinished package too: nothing half is ever found."""
    tier = patient(server)
    with monkeypatch.context() as patch:
        after_piece(patch, number, server.client.flushall)
        assert not save(tier, 0, LARGE)
    assert server.client.keys("*") == []
    assert tier.counters.snapshot()["errors"] == 1


class Killed(BaseException):
    """As the writer's process ends at any moment."""


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_what_a_killed_writer_leaves_expires_and_is_never_found(
    server: Server, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill() -> None:
        raise Killed

    tier = patient(server)
    with monkeypatch.context() as patch:
        after_piece(patch, number, kill)
        with pytest.raises(Killed):
            save(tier, 0, LARGE)
    (left,) = server.client.keys("*")
    assert left.startswith(INCOMING.encode())
    assert 0 < server.client.ttl(left) <= INCOMING_TTL_S
    assert load(patient(server), 0, LARGE) is None
    assert save(patient(server), 0, LARGE)
    assert load(patient(server), 0, LARGE) == features(0, LARGE)


def test_two_writers_of_one_package(server: Server) -> None:
    def write() -> None:
        tier = patient(server)
        for _ in range(10):
            save(tier, 0, LARGE)
            seen.append(load(tier, 0, LARGE) in (None, data))
            tier._reject(identity(0).key)

    seen: list[bool] = []
    data = features(0, LARGE)
    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 30


def test_a_full_server_still_serves(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    tier = patient(server)
    save(tier, 0)
    server.client.config_set("maxmemory", server.client.info("memory")["used_memory"] + 6 * 1024**2)
    try:
        assert not save(tier, 1, LARGE)
        assert not save(tier, 2)
        assert load(tier, 0) == features(0)
    finally:
        server.client.config_set("maxmemory", 0)
    assert [key.decode() for key in server.client.keys("*")] == [PREFIX + identity(0).key]
    assert "(writing) is off" in caplog.text
    assert "(reading)" not in caplog.text


def test_killed_and_started_again_under_load(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vllm.mmcache")
    tier = patient(server, rest_s=1)
    stop = threading.Event()
    wrong: list[int] = []
    longest: list[float] = []

    def work(start: int) -> None:
        number = start
        while not stop.is_set():
            number = (number + 1) % 50
            before = time.perf_counter()
            found = load(tier, number)
            longest.append(time.perf_counter() - before)
            if found is None:
                save(tier, number)
            elif found != features(number):
                wrong.append(number)

    def hits() -> float:
        return tier.counters.snapshot()["hits"]

    def is_off() -> bool:
        return all(any(what in one and "is off" in one for one in caplog.messages) for what in KINDS)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert within(LONG_S, lambda: hits() >= 20)
        server.kill()
        assert within(LONG_S, is_off)
        before = hits()
        server.start()
        assert within(LONG_S, lambda: hits() >= before + 20)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    assert max(longest) < TIMEOUT_S  # who is refused does not wait
    for what in KINDS:
        said = [message for message in caplog.messages if what in message]
        assert ["is off" in said[0], "works again" in said[-1], len(said)] == [True, True, 2]


@pytest.mark.slow
def test_silent_server_costs_one_timeout_and_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    with server_that(lambda connection: time.sleep(60)) as url:
        tier = tier_at(url, rest_s=1000)
        start = time.perf_counter()
        assert load(tier, 0) is None
        assert time.perf_counter() - start >= 0.02
        for number in range(100):
            assert load(tier, number) is None
            save(tier, number)
        assert time.perf_counter() - start < 60  # by then the server would have closed the first connection
    counts = tier.counters.snapshot()
    assert (counts["misses"], counts["errors"], counts["dropped"]) == (101, 2, 99)
    assert len(caplog.messages) == 2  # reading, writing


def trickling(stored: bytes, part_bytes: int, part_s: float) -> Callable[[socket.socket], object]:
    """A server that has `stored` under every key, and gives it slowly."""

    def answer(connection: socket.socket) -> None:
        while request := connection.recv(4096):
            if b"STRLEN" in request:
                connection.sendall(b":%d\r\n" % len(stored))
            elif b"GETRANGE" in request:
                start, end = (int(number) for number in request.split(b"\r\n")[-4::2])
                asked = stored[start : end + 1]
                connection.sendall(b"$%d\r\n" % len(asked))
                for at in range(0, len(asked), part_bytes):
                    time.sleep(part_s)
                    connection.sendall(asked[at : at + part_bytes])
                connection.sendall(b"\r\n")
            else:
                connection.sendall(b"+OK\r\n" * request.count(b"*"))

    return answer


@pytest.mark.slow
def test_a_trickle_is_left_alone_after_one_package(caplog: pytest.LogCaptureFixture) -> None:
    """Bytes come before each timeout is over, but too few."""
    with server_that(trickling(packed(), 100, 0.1)) as url:
        tier = tier_at(url, rest_s=1000, timeout_s=TIMEOUT_S)
        tier._slow_s = 2.0  # as with a timeout of 0.2 s, which a busy machine may reach between two parts
        assert load(tier, 0) is None
        assert load(tier, 0) is None
    counts = tier.counters.snapshot()
    assert (counts["hits"], counts["misses"], counts["errors"]) == (0, 2, 1)
    assert "bytes took" in caplog.text


@pytest.mark.slow
def test_a_slow_server_is_bounded_by_the_time_given(caplog: pytest.LogCaptureFixture) -> None:
    """Also within a piece, which takes 32 s. It is not left alone for that: others decide whether it is of use."""
    with server_that(trickling(packed(0, LARGE), 64 * 1024, 0.5)) as url:
        tier = tier_at(url, timeout_s=TIMEOUT_S)
        start = time.monotonic()
        assert load(tier, 0, LARGE, seconds=2) is None
        assert 2 <= time.monotonic() - start < 30
        counts = tier.counters.snapshot()
        assert (counts["misses"], counts["errors"], counts["set_aside"]) == (1, 1, 0)
        assert not tier.resting()
    with server_that(trickling(packed(0, LARGE), 64 * 1024, 0.001)) as url:
        assert load(tier_at(url, timeout_s=TIMEOUT_S), 0, LARGE) == features(0, LARGE)
    assert not caplog.messages


def test_dead_server() -> None:
    with refusing() as url:
        tier = tier_at(url, rest_s=1000)
        for number in range(100):
            assert load(tier, number) is None
    assert tier.counters.snapshot()["errors"] == 1  # it was tried once


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
        assert load(tier, 0) is None
        assert not save(tier, 0)
        assert tier.counters.snapshot()["errors"] == 2  # reading, writing


def test_the_rest_doubles() -> None:
    failed: list[tuple[float, float]] = []  # when a load that failed began and ended
    with refusing() as url:
        tier = tier_at(url, rest_s=0.05)
        while len(failed) < 5:
            begun = time.monotonic()
            load(tier, 0)
            if tier.counters.snapshot()["errors"] > len(failed):
                failed.append((begun, time.monotonic()))
    rests = [ended - begun for (begun, _), (_, ended) in pairwise(failed)]  # and what the loads took
    assert all(rest >= expected for rest, expected in zip(rests, (0.05, 0.1, 0.2, 0.4), strict=True)), rests


def test_a_password_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    with refusing() as url:
        assert load(tier_at(url.replace("//", "//user:secret@")), 0) is None
    assert "is off" in caplog.text
    assert "secret" not in caplog.text
    with pytest.raises(SettingsError) as error:
        tier_at("redis://user:secret@host/not-a-number?bogus=1")
    assert "secret" not in str(error.value)


def test_a_server_that_wants_a_password(server: Server) -> None:
    server.client.config_set("requirepass", "secret")
    try:
        tier = patient(server)
        assert load(tier, 0) is None
        assert tier.counters.snapshot()["errors"] == 1
        allowed = tier_at(server.url.replace("//", "//:secret@"), timeout_s=TIMEOUT_S)
        save(allowed, 0)
        assert load(allowed, 0) == features(0)
    finally:
        redis.Redis.from_url(server.url, password="secret").config_set("requirepass", "")
