# SPDX-License-Identifier: Apache-2.0
"""The third tier: packages in Redis or Valkey, which replicas share.

A load waits for it `timeout_s` at most, for a connection and for each time that nothing comes; one failure and it is
left alone for seconds. What comes from it is checked like any file: whoever may write there can't make a request fail,
but can plant features, so it must be as trusted as the replicas are.

Packages are large, and the server has one thread: they go there in pieces, under a name of the writer's own, which
becomes the package's name when all of it is there. So a reader finds a whole package or none.
Engine process; reader and writer threads.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from uuid import uuid4

import redis

from vllm_mmcache.base.store_url import error_without_secrets, redact
from vllm_mmcache.components.features.identity import FORMAT
from vllm_mmcache.components.features.lasting import LastingTier
from vllm_mmcache.components.features.package import Buffer
from vllm_mmcache.storage.breaker import Breaker
from vllm_mmcache.storage.encryption import PLAIN, PlainCodec
from vllm_mmcache.storage.redis_nodes import (
    FIRST_REST_S,
    LONGEST_REST_S,
    MAX_TIMEOUTS,
    WRITE_TIMEOUT_S,
    NodeAway,
    Nodes,
    Value,
)

PREFIX = f"mmcache:features:{FORMAT}:"
INCOMING = PREFIX + "incoming:"
INCOMING_TTL_S = 60
"""What a killed writer leaves is gone so long after its last piece."""


class RemoteTier(LastingTier):
    """The server at `url`. Packages of more than `max_bytes` don't go there.

    Units: entries live `ttl_s` from their last use, 0 is for ever; a load waits `timeout_s` for a connection, and for
    each time that nothing comes. Raises: SettingsError for a URL that can't be meant. Makes no connection until
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
        codec: PlainCodec = PLAIN,
    ) -> None:
        shown = redact(url)
        reading, writing = (f"feature store {shown} ({what})" for what in ("reading", "writing"))
        self._nodes = Nodes(url, timeout_s, reading)
        self._writing_nodes = Nodes(url, max(timeout_s, WRITE_TIMEOUT_S), writing)
        super().__init__(
            reading=Breaker(reading, rest_s, LONGEST_REST_S),
            # Apart: what a full server holds can still be read.
            writing=Breaker(writing, rest_s, LONGEST_REST_S),
            codec=codec,
        )
        self._url = url
        self.max_bytes = max_bytes
        self.ttl_s = ttl_s
        self._slow_s = timeout_s * MAX_TIMEOUTS

    def _open(self, name: str) -> AbstractContextManager[Value | None]:
        return self._nodes.open(PREFIX + name, self._slow_s)

    def _renew(self, name: str) -> bool:
        return _extend_ttl(self._writing_nodes, PREFIX + name, self.ttl_s)

    def _use(self, name: str) -> None:
        with suppress(Exception):  # a server that may only be read; what it holds is served all the same
            _extend_ttl(self._nodes, PREFIX + name, self.ttl_s)

    def _write(self, name: str, parts: Iterable[Buffer], num_bytes: int) -> None:
        # The braces have it on the node of a cluster that has the package: a name can't go from one to another.
        incoming = f"{INCOMING}{{{PREFIX}{name}}}:{uuid4().hex}"

        def write(client: "redis.Redis") -> None:
            sent_bytes = 0
            try:
                for part in parts:
                    sent_bytes += len(part)
                    with client.pipeline(transaction=False) as together:
                        together.append(incoming, memoryview(part))
                        together.expire(incoming, INCOMING_TTL_S)
                        if together.execute()[0] != sent_bytes:
                            raise redis.ResponseError("what was written before is gone: is the server full?")
                with client.pipeline(transaction=False) as together:
                    _ = together.expire(incoming, self.ttl_s) if self.ttl_s else together.persist(incoming)
                    together.rename(incoming, PREFIX + name)
                    together.execute()
            except redis.ResponseError:
                with suppress(redis.RedisError):  # it expires
                    client.unlink(incoming)
                raise

        self._writing_nodes.run(incoming, write, again=False)  # the parts come once

    def _fail(self, breaker: Breaker, error: object) -> None:
        if isinstance(error, NodeAway):  # it rests by itself, and the others serve
            self.counters.add(errors=error.is_new, dropped=breaker is self._writing and not error.is_new)
            return
        for nodes in (self._nodes, self._writing_nodes):
            nodes.drop()
        super()._fail(breaker, error_without_secrets(error, self._url))

    def _reject(self, name: str) -> None:
        self._nodes.run(PREFIX + name, lambda client: client.unlink(PREFIX + name))


def _extend_ttl(nodes: Nodes, name: str, ttl_s: int) -> bool:
    """Whether there is such an entry, which now lives for `ttl_s`. Raises: as `Nodes.run`."""
    if ttl_s:
        return bool(nodes.run(name, lambda client: client.expire(name, ttl_s)))
    return bool(nodes.run(name, lambda client: client.persist(name) or client.exists(name)))
