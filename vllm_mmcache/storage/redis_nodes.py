# SPDX-License-Identifier: Apache-2.0
"""The nodes behind a URL of Redis or Valkey: one server, the primaries of a cluster, or the primary of Sentinel.

A server that answers MOVED belongs to a cluster. From then on, the node that has an entry is asked for it. A node that
fails rests by itself, and the other nodes serve. After a failure and after MOVED, a thread of its own reads anew which
node has which slots, and nobody waits for it. redis-py's client for clusters does this in the thread that wants an
entry, where it asks one node after another, sleeps and tries again. It also needs the right to COMMAND.

An entry is read in pieces, from the socket straight into the memory where it is wanted. redis-py's own reading copies
it several times, and can't be stopped while bytes trickle in. Any process, any thread.
"""

import logging
import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, cast

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, MovedError, TryAgainError

from vllm_mmcache.base.errors import StoreCorrupt
from vllm_mmcache.base.redis_connect import checked, client_of, first_host
from vllm_mmcache.base.remote_url import Host
from vllm_mmcache.base.store_url import error_without_secrets
from vllm_mmcache.base.worker_threads import start_thread
from vllm_mmcache.storage.backend import DeadlineExceeded, PartUnavailable
from vllm_mmcache.storage.breaker import CircuitBreaker

logger = logging.getLogger("vllm.mmcache")
T = TypeVar("T")

LONGEST_REST_S = 60.0
NODE_REST_S = 1.0
"""The first rest of a node of a cluster: a replica takes its place within seconds."""
# A server from which bytes trickle keeps each wait below the timeout: after this many of them, it is too slow if it
# gave less than this many bytes a second.
MAX_TIMEOUTS = 10
TRICKLE_BYTES_PER_S = 1_000_000
# Nobody waits for who has which slots, so it may take a while; nor is it asked for more often.
SLOTS_TIMEOUT_S = 1.0
SLOTS_EVERY_S = 0.5
_MAX_LINE_BYTES = 1024


class RedisEntry:
    """The value of one key, read over a connection of its own.

    Units: slow_s is after how long a read that trickles is given up, ttl_s how long a value lives after its last use.
    """

    written_s = 0.0

    def __init__(self, connection: Any, name: str, slow_s: float, ttl_s: int) -> None:
        self._connection = connection
        self._name = name
        self._slow_s = slow_s
        self._ttl_s = ttl_s
        self._first = b""
        self.num_bytes = self._number()

    def read_into(self, offset: int, buffer: memoryview, until: float) -> None:
        """As Source says.

        Raises: DeadlineExceeded after `until`; TimeoutError where bytes only trickle in; what redis-py raises.
        """
        num_bytes = self._get(offset, buffer, until)
        if num_bytes < len(buffer):
            raise StoreCorrupt(f"it ends at byte {offset + num_bytes}")
        if offset == 0:
            self._first = bytes(buffer)

    def is_current(self) -> bool:
        """Whether the value has the same length and the same beginning, which holds a checksum, as when it was read."""
        if not self._first or self._number() != self.num_bytes:
            return False
        again = memoryview(bytearray(len(self._first)))
        return again[: self._get(0, again, math.inf)] == self._first

    def mark_used(self) -> None:
        """As OpenEntry says; a server that may only be read is read all the same."""
        try:
            if self._ttl_s:
                self._connection.send_command("EXPIRE", self._name, self._ttl_s)
            else:
                self._connection.send_command("PERSIST", self._name)
            self._answer(b":")
        except redis.ResponseError:  # it may only be read
            pass
        except Exception:  # the answer may still come: nobody must take it for another one
            self._connection.disconnect()

    def _number(self) -> int:
        self._connection.send_command("STRLEN", self._name)
        return self._answer(b":")

    def _get(self, offset: int, buffer: memoryview, until: float) -> int:
        start = time.monotonic()
        self._connection.send_command("GETRANGE", self._name, offset, offset + len(buffer) - 1)
        num_bytes = self._answer(b"$")
        if num_bytes > len(buffer):
            raise redis.InvalidResponse(f"{num_bytes} bytes, asked were {len(buffer)}")
        got = 0
        while got < num_bytes:
            got += self._receive(buffer[got:num_bytes])
            now = time.monotonic()
            if now > until:
                raise DeadlineExceeded
            if now - start > self._slow_s and got < (now - start) * TRICKLE_BYTES_PER_S:
                raise TimeoutError(f"{got} bytes took {now - start:.2f} s")
        if self._line():
            raise redis.InvalidResponse("more bytes than it said")
        return num_bytes

    def _answer(self, kind: bytes) -> int:
        line = self._line()
        if line.startswith(b"-WRONGTYPE"):
            raise StoreCorrupt(line[1:].decode(errors="replace"))
        if moved := re.fullmatch(rb"-(MOVED|ASK) ([0-9]{1,5} \S*:[0-9]{1,5})", line):
            kind_of_error = MovedError if moved[1] == b"MOVED" else AskError
            raise kind_of_error(moved[2].decode(errors="replace"))
        if line.startswith(b"-CLUSTERDOWN"):
            raise redis.exceptions.ClusterDownError(line[1:].decode(errors="replace"))
        if line.startswith(b"-"):
            raise redis.ResponseError(line[1:].decode(errors="replace"))
        if not re.fullmatch(re.escape(kind) + rb"[0-9]{1,19}", line):
            raise redis.InvalidResponse(f"{line[:80]!r} for an answer")
        return int(line[1:])

    def _line(self) -> bytes:
        start = time.monotonic()
        line = bytearray()
        one = memoryview(bytearray(1))
        while not line.endswith(b"\r\n"):
            if len(line) > _MAX_LINE_BYTES or time.monotonic() - start > self._slow_s:
                raise redis.InvalidResponse(f"{bytes(line[:80])!r} for an answer")
            self._receive(one)
            line += one
        return bytes(line[:-2])

    def _receive(self, buffer: memoryview) -> int:
        sock = self._connection._sock
        if sock is None:
            raise redis.ConnectionError("the connection was closed meanwhile")
        num_bytes = cast(int, sock.recv_into(buffer))
        if num_bytes == 0:
            raise redis.ConnectionError("the server closed the connection")
        return num_bytes


class Nodes:
    """The nodes at `url`.

    timeout_s: the longest wait, in seconds, for a connection and for the next bytes. said: the name of these nodes in
    log lines. Raises: SettingsError for a URL that can't be used. Makes no connection until it is used.
    """

    def __init__(self, url: str, timeout_s: float, said: str) -> None:
        self._said = said
        self._whole_url = url
        self._clients: dict[Host, redis.Redis] = {}
        self._breakers: dict[Host, CircuitBreaker] = {}
        # By slot: the node that has it; empty where this is no cluster, as far as is known.
        self._owners: list[Host | None] = []
        self._members: tuple[Host, ...] = ()
        self._lock = threading.Lock()
        self._is_reading_slots = False
        self._next_slots_s = 0.0
        self._has_told = False
        self._url, self._options = checked(url, timeout_s)
        self._seeds = self._url.hosts if self._url.kind == "cluster" else (first_host(self._url),)

    def run(self, name: str, ask: Callable[["redis.Redis"], T], *, again: bool = True) -> T:
        """Call `ask` with the client of the node that has the entry `name`, and return what it returns.

        again: whether `ask` may be called a second time, if the slot has moved to another node.
        Raises: PartUnavailable; what redis-py raises.
        """
        return self._run(name, ask, again)[1]

    @contextmanager
    def open(self, name: str, slow_s: float, ttl_s: int) -> Iterator[RedisEntry | None]:
        """The value of the entry `name`, over a connection of its own; None if there is none. Raises: as `run`."""
        host, (held, value) = self._run(name, lambda client: _take(client, name, slow_s, ttl_s), True)
        with held, self._minded(host):
            yield value if value.num_bytes else None

    def by_node(self, names: list[str]) -> list[list[str]]:
        """These names, grouped by the node that has them."""
        groups: dict[Host, list[str]] = {}
        for name in names:
            groups.setdefault(self._host_of(name), []).append(name)
        return list(groups.values())

    def primaries(self) -> list["redis.Redis"]:
        """A client of each node that has entries of its own. Waits for the nodes, and raises as redis-py does."""
        for host in self._seeds:
            try:
                if not _is_in_cluster(self._client(host)):
                    return [self._client(host)]
                self._take_slots(host, self._client(host))
            except (redis.RedisError, OSError):
                if host == self._seeds[-1]:
                    raise
            else:
                break
        return [self._client(host) for host in dict.fromkeys(filter(None, self._owners))]

    def drop(self) -> None:
        """Close the connections that nobody uses now."""
        for client in list(self._clients.values()):
            client.connection_pool.disconnect(inuse_connections=False)

    def close(self) -> None:
        """Close all connections."""
        for client in list(self._clients.values()):
            client.connection_pool.disconnect()

    def _run(self, name: str, ask: Callable[["redis.Redis"], T], again: bool) -> tuple[Host, T]:
        host = self._host_of(name)
        for is_last in (not again, True):
            if self._owners and self._breaker(host).is_open():
                self._read_slots_soon()
                raise PartUnavailable(f"node {_words(host)} is left alone", is_new=False)
            try:
                with self._minded(host):
                    return host, ask(self._client(host))
            except MovedError as moved:
                host = self._learn(moved, host)
                if is_last:
                    raise PartUnavailable(f"its slot has moved to {_words(host)}", is_new=True) from None
        raise AssertionError  # the last one returns or raises

    @contextmanager
    def _minded(self, host: Host) -> Iterator[None]:
        """A failure within this block is counted for this node alone, where there are others."""
        try:
            yield
        except MovedError:
            raise
        except (redis.RedisError, OSError) as error:
            # What is left in a pooled connection could be taken for the answer to a later question.
            self._client(host).connection_pool.disconnect(inuse_connections=False)
            if self._owners or len(self._seeds) > 1:
                self._read_slots_soon()
            if not self._owners:
                raise
            if not isinstance(error, (AskError, TryAgainError)):
                self._breaker(host).record_failure(self._text_of(error))
            raise PartUnavailable(self._text_of(error), is_new=True) from None
        else:
            if self._owners:
                self._breaker(host).record_success()

    def _text_of(self, error: Exception) -> str:
        """The text of an error, without secrets."""
        return error_without_secrets(error, self._whole_url)

    def _host_of(self, name: str) -> Host:
        owners = self._owners
        return (owners[key_slot(name.encode())] if owners else None) or self._seeds[0]

    def _client(self, host: Host) -> "redis.Redis":
        if (client := self._clients.get(host)) is None:
            with self._lock:
                client = self._clients.setdefault(host, self._connect(host))
        return client

    def _connect(self, host: Host, **options: Any) -> "redis.Redis":
        return client_of(self._url, host, self._options | options)

    def _breaker(self, host: Host) -> CircuitBreaker:
        if (breaker := self._breakers.get(host)) is None:
            made = CircuitBreaker(f"{self._said}, node {_words(host)}", NODE_REST_S, LONGEST_REST_S)
            breaker = self._breakers.setdefault(host, made)
        return breaker

    def _learn(self, moved: MovedError, asked: Host) -> Host:
        """The node that MOVED names."""
        host = (moved.host or asked[0], moved.port)
        with self._lock:
            self._owners = self._owners or [None] * REDIS_CLUSTER_HASH_SLOTS
            self._owners[moved.slot_id] = host
        self._read_slots_soon()
        return host

    def _read_slots_soon(self) -> None:
        """Start a thread that reads which node has which slots, at most once in SLOTS_EVERY_S; nobody waits for it."""
        with self._lock:
            if self._is_reading_slots or time.monotonic() < self._next_slots_s:
                return
            self._is_reading_slots = start_thread(self._read_slots, "mmcache-slots") is not None

    def _read_slots(self) -> None:
        hosts = list(dict.fromkeys((*self._seeds, *self._members, *filter(None, self._owners))))
        random.shuffle(hosts)
        hosts.sort(key=lambda host: host in self._breakers and self._breakers[host].is_open())
        errors = []
        try:
            for host in hosts:
                client = self._connect(host, socket_timeout=SLOTS_TIMEOUT_S, socket_connect_timeout=SLOTS_TIMEOUT_S)
                try:
                    self._take_slots(host, client)
                except Exception as error:  # a node that is none makes redis-py raise anything
                    errors.append(error)
                else:
                    return
                finally:
                    client.connection_pool.disconnect()
            refused = [error for error in errors if isinstance(error, redis.ResponseError)]
            if refused and not self._has_told:
                self._has_told = True
                logger.warning(
                    "mmcache %s can't ask who has which slots: %s. After a failover, entries may not be found.",
                    self._said,
                    self._text_of(refused[0]),
                )
        finally:
            with self._lock:
                self._is_reading_slots = False
                self._next_slots_s = time.monotonic() + SLOTS_EVERY_S

    def _take_slots(self, asked: Host, client: "redis.Redis") -> None:
        """Ask a node which node has which slots. Raises: what redis-py raises."""
        owners: list[Host | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        members: dict[Host, None] = {}
        for first, last, *nodes in client.execute_command("CLUSTER SLOTS"):  # type: ignore[no-untyped-call]
            # A node that does not know its own address says nothing; `?` is for one whose name nobody has set.
            hosts = [(_text(node[0]) or asked[0], int(node[1])) for node in nodes]
            members |= dict.fromkeys(host for host in hosts if host[0] != "?")
            if hosts[0] in members:
                owners[first : last + 1] = [hosts[0]] * (last + 1 - first)
        with self._lock:
            self._owners = owners
            self._members = tuple(members)
            for host in self._breakers.keys() - set(owners):
                del self._breakers[host]
            for host in self._clients.keys() - members.keys() - set(self._seeds):
                self._clients.pop(host).connection_pool.disconnect(inuse_connections=False)


def _take(client: "redis.Redis", name: str, slow_s: float, ttl_s: int) -> tuple["ExitStack[bool | None]", RedisEntry]:
    """The value of the entry `name`, and the block within which its connection is held."""
    connection = client.connection_pool.get_connection()
    with ExitStack() as stack:
        stack.enter_context(_held(client, connection))
        value = RedisEntry(connection, name, slow_s, ttl_s)
        return stack.pop_all(), value
    raise AssertionError  # the block above returns or raises


@contextmanager
def _held(client: "redis.Redis", connection: Any) -> Iterator[None]:
    """The connection goes back to the client's pool at the end, closed if something was raised within."""
    try:
        yield
    except BaseException:
        # The rest of an answer may be on its way.
        connection.disconnect()
        raise
    finally:
        client.connection_pool.release(connection)


def _is_in_cluster(client: "redis.Redis") -> bool:
    """Whether a server is in cluster mode: HELLO says so, and no ACL forbids that."""
    try:
        said = client.execute_command("HELLO")  # type: ignore[no-untyped-call]
    except redis.ResponseError:  # older than Redis 6
        return False
    pairs = said.items() if isinstance(said, dict) else zip(said[::2], said[1::2], strict=False)
    return {_text(name): value for name, value in pairs}.get("mode") in (b"cluster", "cluster")


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _words(host: Host) -> str:
    return f"{host[0]}:{host[1]}"
