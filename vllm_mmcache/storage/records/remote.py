# SPDX-License-Identifier: Apache-2.0
"""Records in Redis or Valkey, which replicas share. They expire by themselves.

The connections, their time limits and the reading from them are those of the feature store (storage/redis_nodes.py).
"""

from collections.abc import Mapping
from time import monotonic

import redis
from redis.exceptions import MovedError

from vllm_mmcache.base.errors import StoreCorrupt
from vllm_mmcache.base.store_url import error_without_secrets, redact
from vllm_mmcache.storage.breaker import Breaker
from vllm_mmcache.storage.encryption import PLAIN, PlainCodec
from vllm_mmcache.storage.frame import FORMAT, HEAD_BYTES, MAX_VALUE_BYTES
from vllm_mmcache.storage.records.place import Place
from vllm_mmcache.storage.redis_nodes import (
    FIRST_REST_S,
    LONGEST_REST_S,
    MAX_TIMEOUTS,
    WRITE_TIMEOUT_S,
    NodeAway,
    Nodes,
)

PREFIX = f"mmcache:records:{FORMAT}:"


class RemotePlace(Place):
    """The server at `url`. Units: entries live `ttl_s` from their last writing, 0 is for ever; a wait is `timeout_s`.

    Raises: SettingsError for a URL that can't be meant. Makes no connection until it is used.
    """

    name = "remote"
    failures = (Exception,)  # a server that is no Redis makes redis-py raise anything

    def __init__(
        self, url: str, *, ttl_s: int, timeout_s: float, rest_s: float = FIRST_REST_S, codec: PlainCodec = PLAIN
    ) -> None:
        shown = redact(url)
        self._nodes = Nodes(url, timeout_s, f"records in {shown} (reading)")
        self._writing_nodes = Nodes(url, max(timeout_s, WRITE_TIMEOUT_S), f"records in {shown} (writing)")
        super().__init__(shown, rest_s, LONGEST_REST_S, codec)
        self._url = url
        self.ttl_s = ttl_s
        self._timeout_s = timeout_s

    def clear(self) -> None:
        """What others may use, too, expires."""

    def close(self) -> None:
        """Close all connections."""
        for nodes in (self._nodes, self._writing_nodes):
            nodes.close()

    def _fail(self, breaker: Breaker, error: object) -> None:
        if isinstance(error, NodeAway):  # it rests by itself, and the others serve
            self.counts.add(errors=error.is_new)
            return
        for nodes in (self._nodes, self._writing_nodes):
            nodes.drop()
        super()._fail(breaker, error_without_secrets(error, self._url))

    def _load(self, key: bytes) -> tuple[bytes, float] | None:
        try:
            with self._nodes.open(PREFIX + key.hex(), self._timeout_s * MAX_TIMEOUTS) as value:
                if value is None:
                    return None
                most_bytes = self._codec.num_bytes(HEAD_BYTES + MAX_VALUE_BYTES)
                framed = bytearray(min(value.num_bytes, most_bytes))
                value.read_into(0, memoryview(framed), monotonic() + self._timeout_s * MAX_TIMEOUTS)
        except StoreCorrupt:  # of another type, or cut meanwhile
            return b"", 0.0
        return bytes(framed), 0.0  # so it is written again, for another `ttl_s`

    def _save(self, frames: Mapping[bytes, bytes]) -> int:
        named = {PREFIX + key.hex(): framed for key, framed in frames.items()}
        num_kept = 0
        for names in self._writing_nodes.by_node(list(named)):
            try:
                num_kept += self._set({name: named[name] for name in names})
            except NodeAway as error:  # the other nodes' records are kept
                self._fail(self._writing, error)
        return num_kept

    def _set(self, named: Mapping[str, bytes]) -> int:
        """Keep these values, of which one node has all, as far as is known. Raises: as `Nodes.run`."""

        def set_all(client: "redis.Redis") -> list[str]:
            with client.pipeline(transaction=False) as together:
                for name, framed in named.items():
                    together.set(name, framed, ex=self.ttl_s or None)
                answers = together.execute(raise_on_error=False)
            for answer in answers:
                if isinstance(answer, Exception) and not isinstance(answer, MovedError):
                    raise answer
            return [name for name, answer in zip(named, answers, strict=True) if isinstance(answer, MovedError)]

        for name in self._writing_nodes.run(next(iter(named)), set_all):
            self._set_at_its_node(name, named[name])
        return len(named)

    def _set_at_its_node(self, name: str, framed: bytes) -> None:
        self._writing_nodes.run(name, lambda client: client.set(name, framed, ex=self.ttl_s or None))
