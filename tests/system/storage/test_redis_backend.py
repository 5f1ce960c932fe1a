# SPDX-License-Identifier: Apache-2.0
"""Entries in Redis: the contract over a real Valkey, and what is special about large ones and those that expire."""

import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import redis

from tests.support.packages import BUDGET_BYTES as PACKAGES_BYTES
from tests.support.packages import LARGE, SHAPE, features, identity, load, packed, redis_tier, save
from tests.support.redis_faults import after_piece, between
from tests.support.storage_contract import KEYED, Killed, Place, StorageContract
from tests.support.store_server import TIMEOUT_S, Server
from tests.support.tiers import LONG_S, within
from vllm_mmcache.components.features import tiers
from vllm_mmcache.components.features.identity import Identity
from vllm_mmcache.components.features.package import Shape, pack
from vllm_mmcache.components.features.tiers import FEATURES
from vllm_mmcache.storage import encryption
from vllm_mmcache.storage.backend import Backend
from vllm_mmcache.storage.encryption import PLAIN, PlainCodec
from vllm_mmcache.storage.frame import MAX_VALUE_BYTES, frame, key
from vllm_mmcache.storage.kind import Kind
from vllm_mmcache.storage.record_store import RECORDS
from vllm_mmcache.storage.redis_backend import INCOMING, INCOMING_TTL_S, RedisBackend
from vllm_mmcache.storage.redis_nodes import RedisEntry
from vllm_mmcache.storage.tier import PIECE_BYTES, Tier

EARLIER = Path(__file__).parents[2] / "unit" / "storage" / "data" / "earlier_store"
PREFIX = FEATURES.remote_prefix
NAME = PREFIX + identity(0).key
MANY_BYTES = 512 * 1024**2


class RedisPlace(Place):
    entry_class = RedisEntry
    served_while = frozenset({"full", "read_only"})
    empty_is_a_miss = True

    def __init__(self, server: Server) -> None:
        self._server, self._client = server, server.client

    def backend(self, kind: Kind, *, ttl_s: int = 0, budget_bytes: int = 0) -> RedisBackend:
        return RedisBackend(self._server.url, kind, ttl_s=ttl_s, timeout_s=TIMEOUT_S, max_bytes=PACKAGES_BYTES)

    def name(self, kind: Kind, name: bytes) -> str:
        return f"mmcache:{kind.name}:{kind.format}:{name.hex()}"

    def write(self, kind: Kind, name: bytes, content: bytes) -> None:
        self._client.set(self.name(kind, name), content)

    def read(self, kind: Kind, name: bytes) -> bytes | None:
        found: bytes | None = self._client.get(self.name(kind, name))
        return found

    def age(self, kind: Kind, name: bytes, seconds: float) -> None:
        left_ms = self._client.pttl(self.name(kind, name))
        if left_ms > 0:
            self._client.pexpire(self.name(kind, name), max(0, left_ms - int(seconds * 1000)))

    def lay_strangers(self, kind: Kind) -> None:
        ours = f"mmcache:{kind.name}"
        self._strangers = (
            f"{ours}:{kind.format}:notes",
            f"{ours}:{kind.format}:{'ab' * 31}",
            f"{ours}:{kind.format}:{'xy' * 32}",
            f"{ours}:{kind.format}:{INCOMING}{{{ours}:{kind.format}:{'ab' * 32}}}:{'cd' * 16}",
            f"{ours}:{kind.format + 1}:{'ab' * 32}",
            f"{ours}-of-others:{kind.format}:{'ab' * 32}",
        )
        for name in self._strangers:
            self._client.set(name, b"mine")
        self._client.rpush(f"{ours}:{kind.format}:a list", "mine")

    def strangers(self, kind: Kind) -> int:
        lists = self._client.lrange(f"mmcache:{kind.name}:{kind.format}:a list", 0, -1)
        return [*(self._client.get(name) for name in self._strangers), *lists].count(b"mine")

    def remove(self) -> None:
        self._client.flushall()

    @contextmanager
    def full(self, backend: Backend) -> Iterator[None]:
        self._client.config_set("maxmemory", 1)
        yield
        self._client.config_set("maxmemory", 0)

    @contextmanager
    def _rights(self, *rule: str) -> Iterator[None]:
        self._client.execute_command("ACL SETUSER", "default", *rule)
        yield
        self._client.execute_command("ACL SETUSER", "default", "+@all")

    @contextmanager
    def read_only(self, backend: Backend) -> Iterator[None]:
        with self._rights("-@write", "+acl"):
            yield

    @contextmanager
    def not_ours(self, backend: Backend) -> Iterator[None]:
        with self._rights("-@all", "+acl"):
            yield

    @contextmanager
    def unreachable(self, backend: Backend) -> Iterator[None]:
        self._server.kill()
        yield
        self._server.start()

    @contextmanager
    def busy(self, backend: Backend) -> Iterator[None]:
        """The server hangs, for longer than it is waited for."""
        assert isinstance(backend, RedisBackend)
        with pytest.MonkeyPatch.context() as patch:
            for nodes in (backend._nodes, backend._writing_nodes):
                nodes.close()
                nodes._clients.clear()
                patch.setattr(nodes, "_options", nodes._options | {"socket_timeout": 0.05})
            os.kill(self._server.pid, signal.SIGSTOP)
            yield
            os.kill(self._server.pid, signal.SIGCONT)
        for nodes in (backend._nodes, backend._writing_nodes):
            nodes.close()
            nodes._clients.clear()


class TestRedis(StorageContract):
    @pytest.fixture
    def place(self, server: Server) -> RedisPlace:
        return RedisPlace(server)


def tier_at(server: Server, codec: PlainCodec = PLAIN, ttl_s: int = 100, rest_s: float = 5.0) -> Tier:
    """A tier whose timeout a busy test machine does not reach."""
    return redis_tier(server.url, ttl_s=ttl_s, timeout_s=TIMEOUT_S, codec=codec, rest_s=(rest_s, 60.0))


def count(tier: Tier, name: str) -> float:
    return tier.counts.snapshot()[name]


@pytest.mark.parametrize("codec", [PLAIN, KEYED], ids=["plain", "encrypted"])
def test_large_content_in_pieces(server: Server, codec: PlainCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    """No command and no answer has more than one piece, so that the server is there for others in between."""
    tier = tier_at(server, codec)
    send, sent = redis.Connection.send_packed_command, []
    with monkeypatch.context() as patch:
        patch.setattr(
            redis.Connection,
            "send_packed_command",
            lambda self, command, **other: (sent.append(sum(map(len, command))), send(self, command, **other))[1],
        )
        assert save(tier, 0, LARGE)
    assert max(sent) < PIECE_BYTES + 1000
    assert len(sent) > 3
    asked: list[int] = []
    with monkeypatch.context() as patch:
        between(patch, asked.append)
        assert load(tier, 0, LARGE) == features(0, LARGE)
    assert max(later - before for before, later in pairwise(asked)) <= PIECE_BYTES + 100
    (name,) = server.client.keys("*")
    entry, whole = server.client.get(name), packed(0, LARGE)
    assert count(tier, "saved_bytes") == len(entry) == codec.num_bytes(len(whole))
    assert codec.decrypt_bytes(codec.name(tiers.key_of(identity(0))), entry) == whole
    assert server.client.ttl(name) > 90


@pytest.mark.slow
def test_eighty_mebibytes(server: Server) -> None:
    shape = Shape(16384, 2560, "bfloat16")
    tier = redis_tier(server.url, timeout_s=TIMEOUT_S, max_bytes=MANY_BYTES)
    assert save(tier, 0, shape)
    assert load(tier, 0, shape) == features(0, shape)


def test_what_is_larger_than_may_be_is_neither_sent_nor_asked_for(server: Server) -> None:
    """Another replica may have a larger limit: its entry stays."""
    assert save(tier_at(server), 0)
    smaller = redis_tier(server.url, timeout_s=TIMEOUT_S, max_bytes=SHAPE.num_bytes - 1)
    assert not save(smaller, 1)
    assert load(smaller, 0) is None
    assert (count(smaller, "dropped"), count(smaller, "set_aside")) == (1, 0)
    assert load(redis_tier(server.url, timeout_s=TIMEOUT_S, max_bytes=SHAPE.num_bytes), 0) == features(0)


@pytest.mark.parametrize("value", [b"", b"v" * MAX_VALUE_BYTES])
@pytest.mark.parametrize("codec", [PLAIN, KEYED], ids=["plain", "encrypted"])
def test_the_smallest_and_the_largest_value(server: Server, value: bytes, codec: PlainCodec) -> None:
    tier = Tier(RECORDS, RedisPlace(server).backend(RECORDS), codec)
    tier.put_many({key("a"): value})
    found = tier.get(key("a"), bytes)
    assert found is not None
    assert found[1] == value


def test_valkey_is_a_scheme_too(server: Server) -> None:
    save(tier_at(server), 0)
    assert load(redis_tier(server.url.replace("redis", "valkey", 1), timeout_s=TIMEOUT_S), 0) == features(0)


def test_an_entry_of_another_type(server: Server) -> None:
    server.client.rpush(NAME, "x")
    tier = tier_at(server)
    assert load(tier, 0) is None
    assert not server.client.exists(NAME)
    server.client.rpush(NAME, "x")
    assert save(tier, 0)  # over it, by one that has not looked before
    assert load(tier, 0) == features(0)
    records = Tier(RECORDS, RedisPlace(server).backend(RECORDS))
    name = RECORDS.remote_prefix + key("a").hex()
    server.client.rpush(name, "x")
    assert records.get(key("a"), bytes) is None
    records.put_many({key("a"): b"value"})
    assert server.client.get(name) == frame(key("a"), b"value")
    assert (count(tier, "set_aside"), count(tier, "errors")) == (1, 0)
    assert (count(records, "corrupt"), count(records, "errors")) == (1, 0)


def test_one_that_is_shortened_while_it_is_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A miss; the next load finds what is there now, and takes it out of service."""
    tier = tier_at(server)
    save(tier, 0, LARGE)
    short = packed(0, LARGE)[: 2 * PIECE_BYTES]
    with monkeypatch.context() as patch:
        between(patch, lambda offset: server.client.set(NAME, short) if offset > PIECE_BYTES else None)
        assert load(tier, 0, LARGE) is None
    assert (count(tier, "misses"), count(tier, "set_aside"), count(tier, "errors")) == (1, 0, 0)
    assert load(tier, 0, LARGE) is None
    assert (count(tier, "set_aside"), server.client.exists(NAME)) == (1, 0)


def test_one_that_is_replaced_while_it_is_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one of the same length: what another replica has put there stays."""
    tier = tier_at(server)
    save(tier, 0, LARGE)
    new = pack(identity(0), LARGE, features(1, LARGE))
    with monkeypatch.context() as patch:
        between(patch, lambda offset: server.client.set(NAME, new) if offset > PIECE_BYTES else None)
        assert load(tier, 0, LARGE) is None
    assert (count(tier, "misses"), count(tier, "set_aside"), count(tier, "errors")) == (1, 0, 0)
    assert load(tier, 0, LARGE) == features(1, LARGE)


def test_a_server_killed_between_pieces_of_a_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tier_at(server, rest_s=0)
    save(tier, 0, LARGE)
    try:
        with monkeypatch.context() as patch:
            between(patch, lambda offset: server.kill() if offset > PIECE_BYTES else None)
            assert load(tier, 0, LARGE) is None
    finally:
        server.start()
    assert count(tier, "errors") == 1
    save(tier, 0, LARGE)
    assert load(tier, 0, LARGE) == features(0, LARGE)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_server_killed_between_pieces_of_a_write(
    server: Server, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_at(server, rest_s=0)
    try:
        with monkeypatch.context() as patch:
            after_piece(patch, number, server.kill)
            assert not save(tier, 0, LARGE)
    finally:
        server.start()
    assert count(tier, "errors") == 1
    assert save(tier, 0, LARGE)
    assert load(tier, 0, LARGE) == features(0, LARGE)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_pieces_that_go_while_others_are_written(server: Server, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full server may evict what lies there, the unfinished package too: nothing half is ever found."""
    tier = tier_at(server)
    with monkeypatch.context() as patch:
        after_piece(patch, number, server.client.flushall)
        assert not save(tier, 0, LARGE)
    assert server.client.keys("*") == []
    assert count(tier, "errors") == 1


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_what_a_killed_writer_leaves_expires_and_is_never_found(
    server: Server, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill() -> None:
        raise Killed

    tier = tier_at(server)
    with monkeypatch.context() as patch:
        after_piece(patch, number, kill)
        with pytest.raises(Killed):
            save(tier, 0, LARGE)
    (left,) = server.client.keys("*")
    assert left.startswith((PREFIX + INCOMING).encode())
    assert 0 < server.client.ttl(left) <= INCOMING_TTL_S
    assert load(tier_at(server), 0, LARGE) is None
    assert save(tier_at(server), 0, LARGE)
    assert load(tier_at(server), 0, LARGE) == features(0, LARGE)


def test_a_server_that_fills_up_while_it_is_written_to(server: Server) -> None:
    """Nothing half is left, and what is there is served."""
    tier = tier_at(server)
    save(tier, 0)
    server.client.config_set("maxmemory", server.client.info("memory")["used_memory"] + 6 * 1024**2)
    try:
        assert not save(tier, 1, LARGE)
        assert load(tier, 0) == features(0)
    finally:
        server.client.config_set("maxmemory", 0)
    assert server.client.keys("*") == [NAME.encode()]


def test_two_writers_of_one_entry(server: Server) -> None:
    """Each under a name of its own: whole, or not at all."""
    seen: list[bool] = []
    data = features(0, LARGE)

    def write() -> None:
        tier = tier_at(server)
        for _ in range(5):
            save(tier, 0, LARGE)
            seen.append(load(tier, 0, LARGE) in (None, data))
            tier.backend.reject(tiers.key_of(identity(0)))

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 15


def test_killed_and_started_again_under_load(server: Server, log: pytest.LogCaptureFixture) -> None:
    """Nothing wrong is ever found, nobody waits, and the log has two lines of each kind."""
    log.set_level("INFO", "vllm.mmcache")
    tier = tier_at(server, rest_s=1)
    stop = threading.Event()
    wrong: list[int] = []
    kinds = ("(reading)", "(writing)")

    def work(start: int) -> None:
        number = start
        while not stop.is_set():
            number = (number + 1) % 50
            found = load(tier, number, seconds=TIMEOUT_S / 2)  # who is refused does not wait
            if found is None:
                save(tier, number)
            elif found != features(number):
                wrong.append(number)

    def are_off() -> bool:
        return all(any(kind in line and "is off" in line for line in log.messages) for kind in kinds)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert within(LONG_S, lambda: count(tier, "hits") >= 20)
        server.kill()
        assert within(LONG_S, are_off)
        before = count(tier, "hits")
        server.start()
        assert within(LONG_S, lambda: count(tier, "hits") >= before + 20)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    for kind in kinds:
        said = [line for line in log.messages if kind in line]
        assert ["is off" in said[0], "works again" in said[-1], len(said)] == [True, True, 2]


# How long entries live.


def test_a_hit_is_for_another_while(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the connection that it was read with: the server is asked for no further one."""
    tier = tier_at(server)
    assert save(tier, 0)
    assert 90 < server.client.ttl(NAME) <= 100
    server.client.expire(NAME, 50)
    assert load(tier, 1) is None
    assert server.client.ttl(NAME) <= 50
    assert load(tier, 0) == features(0)
    assert server.client.ttl(NAME) > 90
    num_connections = server.client.info("stats")["total_connections_received"]
    assert load(tier, 0) == features(0)
    assert server.client.info("stats")["total_connections_received"] == num_connections
    server.client.expire(NAME, 50)
    assert save(tier, 0)  # it is there, and used: the tower ran again
    assert server.client.ttl(NAME) > 90


def test_what_is_damaged_is_not_used(server: Server) -> None:
    """It was looked at, and lives no longer for that."""
    tier = tier_at(server)
    server.client.set(NAME, packed(0)[:-1] + b"x", ex=50)
    assert not load(redis_tier(server.url, ttl_s=100, codec=KEYED), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier.backend, "reject", lambda name: None)
        assert load(tier, 0) is None
    assert count(tier, "set_aside") == 1
    assert server.client.ttl(NAME) <= 50


@pytest.mark.parametrize("ttl_s", [100, 0])
def test_a_server_that_takes_no_expiry_still_serves(server: Server, ttl_s: int) -> None:
    """As a replica of it, which is read-only; and the answer is not taken for that of the next question."""
    tier = tier_at(server, ttl_s=ttl_s)
    assert save(tier, 0)
    with RedisPlace(server)._rights("-expire", "-persist"):
        for _ in range(3):
            assert load(tier, 0) == features(0)
        assert count(tier, "errors") == 0


def test_no_ttl_is_for_ever(server: Server) -> None:
    assert save(tier_at(server), 0)
    for use_it in (save, load):
        server.client.expire(NAME, 100)
        assert use_it(tier_at(server, ttl_s=0), 0)
        assert server.client.ttl(NAME) == -1
    server.client.flushall()
    assert save(tier_at(server, ttl_s=0), 0)
    assert server.client.ttl(NAME) == -1
    assert server.client.dbsize() == 1


@pytest.mark.parametrize("ttl_s", [1000, 0])
def test_values_live_from_when_they_were_put(server: Server, ttl_s: int) -> None:
    tier = Tier(RECORDS, RedisPlace(server).backend(RECORDS, ttl_s=ttl_s))
    name = RECORDS.remote_prefix + key("a").hex()
    for _ in range(2):
        tier.put_many({key("a"): b"value"})
        ttl = server.client.ttl(name)
        assert 900 < ttl <= 1000 if ttl_s else ttl == -1
        server.client.expire(name, 50)
        found = tier.get(key("a"), bytes)
        assert found is not None
        assert found[0].written_s == 0  # not known, so whoever finds it puts it again
        assert server.client.ttl(name) <= 50


# What was there before this version.


class Earlier:
    """A store as earlier versions of this format have left it in Redis."""

    def __init__(self, server: Server, which: str, folder: Path) -> None:
        manifest = json.loads((EARLIER / "manifest.json").read_text())
        key_file = folder / "key"
        key_file.touch(0o600)
        key_file.write_bytes((EARLIER / manifest["key_file"]).read_bytes())
        self.codec = encryption.of(str(key_file) if which == "encrypted" else None)
        self.entries = {
            name: bytes.fromhex(entry["hex"])
            for name, entry in json.loads((EARLIER / manifest[which]["redis"]).read_text()).items()
        }
        self.packages = [
            (Identity.from_json(one["identity"]), Shape(*one["shape"], *[one["dtype"]]), one["features_hex"])
            for one in manifest[which]["packages"]
        ]
        self.records = {
            bytes.fromhex(one["key"]): bytes.fromhex(one["value_hex"]) for one in manifest[which]["records"]
        }
        place = RedisPlace(server)
        self.features, self.values = (Tier(kind, place.backend(kind), self.codec) for kind in (FEATURES, RECORDS))

    def found(self, package: tuple[Identity, Shape, str]) -> bool:
        who, shape, expected = package
        room = memoryview(bytearray(b"\xa5" * shape.num_bytes))
        return tiers.load(self.features, who, shape, lambda: room, 1e18) and room.hex() == expected


def lies(server: Server) -> Mapping[str, bytes]:
    return {name.decode(): server.client.get(name) for name in server.client.keys("*")}


@pytest.fixture(params=["plain", "encrypted"])
def earlier(request: pytest.FixtureRequest, server: Server, tmp_path: Path) -> Earlier:
    return Earlier(server, request.param, tmp_path)


def test_what_an_earlier_version_wrote_is_read(earlier: Earlier, server: Server) -> None:
    for name, entry in earlier.entries.items():
        server.client.set(name, entry)
    assert len(earlier.packages) + len(earlier.records) == len(earlier.entries) == 16
    assert all(earlier.found(package) for package in earlier.packages)
    for known, value in earlier.records.items():
        found = earlier.values.get(known, bytes)
        assert found is not None
        assert found[1] == value
    for name, entry in earlier.entries.items():  # the control
        server.client.set(name, entry[:-1] + bytes([entry[-1] ^ 1]))
    assert not any(earlier.found(package) for package in earlier.packages)
    assert [earlier.values.get(known, bytes) for known in earlier.records] == [None] * len(earlier.records)


def test_what_is_written_can_be_read_by_an_earlier_version(earlier: Earlier, server: Server) -> None:
    """Names are the same, and what is not encrypted is the same byte for byte; nonces differ each time."""
    for who, shape, content in earlier.packages:
        assert tiers.save(earlier.features, who, shape, memoryview(bytes.fromhex(content)))
    earlier.values.put_many(earlier.records)
    written = lies(server)
    assert written.keys() == earlier.entries.keys()
    for name, entry in earlier.entries.items():
        binary = bytes.fromhex(name.rpartition(":")[2])
        assert len(written[name]) == len(entry)
        assert earlier.codec.decrypt_bytes(binary, written[name]) == earlier.codec.decrypt_bytes(binary, entry)
        assert earlier.codec is not PLAIN or written[name] == entry
