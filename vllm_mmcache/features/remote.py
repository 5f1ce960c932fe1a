# SPDX-License-Identifier: Apache-2.0
"""The third tier: packages in Redis or Valkey, which replicas share.

A load waits for it `timeout_s` at most, for a connection and for each time that nothing comes; one failure and it is
left alone for seconds. What comes from it is checked like any file: whoever may write there can't make a request fail,
but can plant features, so it must be as trusted as the replicas are.

Packages are large, and the server has one thread: they go there in pieces, under a name of the writer's own, which
becomes the package's name when all of it is there. So a reader finds a whole package or none. They come in pieces,
too, from the socket straight into the memory where they are wanted: redis-py's own reading copies them several times,
and can't be stopped while bytes trickle in.
"""

import math
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, cast
from uuid import uuid4

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from vllm_mmcache.errors import SettingsError, StoreCorrupt
from vllm_mmcache.features.breaker import Breaker
from vllm_mmcache.features.identity import FORMAT
from vllm_mmcache.features.lasting import LastingTier, Late
from vllm_mmcache.features.package import Buffer
from vllm_mmcache.sealing import CLEAR, Clear
from vllm_mmcache.settings import without_secrets

PREFIX = f"mmcache:features:{FORMAT}:"
INCOMING = PREFIX + "incoming:"
INCOMING_TTL_S = 60
"""What a killed writer leaves is gone so long after its last piece."""
FIRST_REST_S = 5.0
LONGEST_REST_S = 60.0
# No request waits for a write, and several megabytes into a busy server take their time.
WRITE_TIMEOUT_S = 1.0
# A server from which bytes trickle keeps each wait below the timeout: after this many of them, it is too slow if it
# gave less than this many bytes a second.
MAX_TIMEOUTS = 10
TRICKLE_BYTES_PER_S = 1_000_000
_MAX_LINE_BYTES = 1024


class Value:
    """The value of one key, read over a connection of its own."""

    def __init__(self, connection: Any, name: str, slow_s: float) -> None:
        self._connection = connection
        self._name = name
        self._slow_s = slow_s
        self._first = b""
        self.num_bytes = self._number()

    def read_into(self, offset: int, buffer: memoryview, until: float) -> None:
        """As Source says.

        Raises: Late after `until`, TimeoutError where bytes only trickle in, others as redis-py does.
        """
        num_bytes = self._get(offset, buffer, until)
        if num_bytes < len(buffer):
            raise StoreCorrupt(f"it ends at byte {offset + num_bytes}")
        if offset == 0:
            self._first = bytes(buffer)

    def is_current(self) -> bool:
        """Whether the value begins as it did, with the checksum of what was read."""
        if not self._first or self._number() != self.num_bytes:
            return False
        again = memoryview(bytearray(len(self._first)))
        return again[: self._get(0, again, math.inf)] == self._first

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
                raise Late
            if now - start > self._slow_s and got < (now - start) * TRICKLE_BYTES_PER_S:
                raise TimeoutError(f"{got} bytes took {now - start:.2f} s")
        if self._line():
            raise redis.InvalidResponse("more bytes than it said")
        return num_bytes

    def _answer(self, kind: bytes) -> int:
        line = self._line()
        if line.startswith(b"-WRONGTYPE"):
            raise StoreCorrupt(line[1:].decode(errors="replace"))
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
        num_bytes = cast(int, self._connection._sock.recv_into(buffer))
        if num_bytes == 0:
            raise redis.ConnectionError("the server closed the connection")
        return num_bytes


class RemoteTier(LastingTier):
    """The server at `url`. Packages of more than `max_bytes` don't go there.

    Units: entries live `ttl_s` from their last use, 0 is for ever; a load waits `timeout_s` for a connection, and for
    each time that nothing comes. Raises: SettingsError for a URL that redis-py does not take. Makes no connection until
    it is used.
    """

    name = "remote"
    failures = (Exception,)  # a server that is no Redis makes redis-py raise anything

    def __init__(
        self,
        url: str,
        *,
        ttl_s: int,
        max_bytes: int,
        timeout_s: float,
        rest_s: float = FIRST_REST_S,
        key: Clear = CLEAR,
    ) -> None:
        shown = without_secrets(url)
        try:
            self._client = connect(url, timeout_s)
            self._writing_client = connect(url, max(timeout_s, WRITE_TIMEOUT_S))
        except (ValueError, TypeError, redis.RedisError) as error:
            raise SettingsError(
                f"store {shown!r} is no URL of Redis or Valkey: {without_secrets(str(error))}"
            ) from None
        super().__init__(
            reading=Breaker(f"feature store {shown} (reading)", rest_s, LONGEST_REST_S),
            # Apart: what a full server holds can still be read.
            writing=Breaker(f"feature store {shown} (writing)", rest_s, LONGEST_REST_S),
            key=key,
        )
        self.max_bytes = max_bytes
        self.ttl_s = ttl_s
        self._slow_s = timeout_s * MAX_TIMEOUTS

    def _open(self, key: str) -> AbstractContextManager[Value | None]:
        return open_value(self._client, PREFIX + key, self._slow_s)

    def _renew(self, key: str) -> bool:
        return _renew(self._writing_client, PREFIX + key, self.ttl_s)

    def _use(self, key: str) -> None:
        with suppress(Exception):  # a server that may only be read; what it holds is served all the same
            _renew(self._client, PREFIX + key, self.ttl_s)

    def _write(self, key: str, parts: Iterable[Buffer], num_bytes: int) -> None:
        incoming = INCOMING + uuid4().hex
        sent_bytes = 0
        try:
            for part in parts:
                sent_bytes += len(part)
                with self._writing_client.pipeline() as together:
                    together.append(incoming, memoryview(part))
                    together.expire(incoming, INCOMING_TTL_S)
                    if together.execute()[0] != sent_bytes:
                        raise redis.ResponseError("what was written before is gone: is the server full?")
            with self._writing_client.pipeline() as together:
                _ = together.expire(incoming, self.ttl_s) if self.ttl_s else together.persist(incoming)
                together.rename(incoming, PREFIX + key)
                together.execute()
        except redis.ResponseError:
            with suppress(redis.RedisError):  # it expires
                self._writing_client.unlink(incoming)
            raise

    def _fail(self, breaker: Breaker, error: Exception) -> None:
        # What is left in a pooled connection could be taken for the answer to a later question.
        for client in (self._client, self._writing_client):
            client.connection_pool.disconnect(inuse_connections=False)
        super()._fail(breaker, error)

    def _reject(self, key: str) -> None:
        self._client.unlink(PREFIX + key)


def _renew(client: "redis.Redis", name: str, ttl_s: int) -> bool:
    """Whether there is such an entry, which now lives for `ttl_s`. Raises: as redis-py does."""
    if ttl_s:
        return bool(client.expire(name, ttl_s))
    return bool(client.persist(name) or client.exists(name))


@contextmanager
def open_value(client: "redis.Redis", name: str, slow_s: float) -> Iterator[Value | None]:
    """What lies under `name`, over a connection of its own; None where there is nothing. Raises: as redis-py does."""
    pool = client.connection_pool
    connection = pool.get_connection()
    try:
        value = Value(connection, name, slow_s)
        yield value if value.num_bytes else None
    except BaseException:
        # The rest of an answer may be on its way.
        connection.disconnect()  # type: ignore[no-untyped-call]
        raise
    finally:
        pool.release(connection)


def connect(url: str, timeout_s: float) -> "redis.Redis":
    """A client that waits `timeout_s` at most, once. Raises: ValueError, TypeError, RedisError for a wrong URL."""
    client = redis.Redis.from_url(
        re.sub("^valkey", "redis", url),
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        protocol=2,  # one round trip less to connect, and nothing that a server pushes
        retry=Retry(NoBackoff(), 0),  # redis-py's own retries wait for seconds
    )
    client.connection_pool.make_connection()  # an option that redis-py does not know raises here, not in a request
    return client
