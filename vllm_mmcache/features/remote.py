# SPDX-License-Identifier: Apache-2.0
"""The third tier: packages in Redis or Valkey, which replicas share.

A request waits for it `timeout_s` at most, for a connection and for each read; one failure and it is left alone for
seconds. What comes from it is checked like any file: whoever may write there can't make a request fail, but can plant
features, so it must be as trusted as the replicas are.
"""

import re
import time
from typing import cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from vllm_mmcache.errors import SettingsError, StoreCorrupt
from vllm_mmcache.features.breaker import Breaker
from vllm_mmcache.features.lasting import LastingTier
from vllm_mmcache.settings import without_secrets

PREFIX = "mmcache:features:1:"
FIRST_REST_S = 5.0
LONGEST_REST_S = 60.0
# No request waits for a write, and several megabytes into a busy server take their time.
WRITE_TIMEOUT_S = 1.0
# A slow network can keep every single read below the timeout; a package that takes this many in all is too slow.
MAX_TIMEOUTS = 10


class RemoteTier(LastingTier):
    """The server at `url`. Units: entries live `ttl_s` from their writing; `timeout_s` as in the module docstring.

    Raises: SettingsError for a URL that redis-py does not take. Makes no connection until it is used.
    """

    name = "remote"
    failures = (Exception,)  # a server that is no Redis makes redis-py raise anything

    def __init__(self, url: str, *, ttl_s: int, max_bytes: int, timeout_s: float, rest_s: float = FIRST_REST_S) -> None:
        shown = without_secrets(url)
        try:
            self._client = _client(url, timeout_s)
            self._writing_client = _client(url, max(timeout_s, WRITE_TIMEOUT_S))
        except (ValueError, TypeError, redis.RedisError) as error:
            raise SettingsError(
                f"store {shown!r} is no URL of Redis or Valkey: {without_secrets(str(error))}"
            ) from None
        breaker = Breaker(f"feature store {shown}", rest_s, LONGEST_REST_S)
        super().__init__(reading=breaker, writing=breaker)
        self.max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._slow_s = timeout_s * MAX_TIMEOUTS

    def _read(self, key: str) -> bytes | None:
        start = time.perf_counter()
        try:
            # Not GET: whatever lies there, no more than the limit is read.
            value = cast(bytes, self._client.getrange(PREFIX + key, 0, self.max_bytes))
        except redis.ResponseError as error:
            if str(error).startswith("WRONGTYPE"):
                raise StoreCorrupt(str(error)) from None
            raise
        if (taken_s := time.perf_counter() - start) > self._slow_s:
            self._fail(self._reading, TimeoutError(f"{len(value)} bytes took {taken_s:.2f} s"))
        return value if 0 < len(value) <= self.max_bytes else None

    def _holds(self, key: str) -> bool:
        return bool(self._client.exists(PREFIX + key))

    def _write(self, key: str, packed: bytes) -> None:
        self._writing_client.set(PREFIX + key, packed, ex=self._ttl_s)

    def _fail(self, breaker: Breaker, error: Exception) -> None:
        # What is left in a pooled connection could be taken for the answer to a later question.
        for client in (self._client, self._writing_client):
            client.connection_pool.disconnect(inuse_connections=False)
        super()._fail(breaker, error)

    def _reject(self, key: str) -> None:
        self._client.delete(PREFIX + key)


def _client(url: str, timeout_s: float) -> "redis.Redis":
    client = redis.Redis.from_url(
        re.sub("^valkey", "redis", url),
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        protocol=2,  # one round trip less to connect, and nothing that a server pushes
        retry=Retry(NoBackoff(), 0),  # redis-py's own retries wait for seconds
    )
    client.connection_pool.make_connection()  # an option that redis-py does not know raises here, not in a request
    return client
