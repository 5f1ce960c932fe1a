# SPDX-License-Identifier: Apache-2.0
"""Records in Redis or Valkey, which replicas share. They expire by themselves.

The connection, its time limits and the reading from it are those of the feature store (features/remote.py).
"""

from collections.abc import Mapping
from time import monotonic

from vllm_mmcache.errors import SettingsError, StoreCorrupt
from vllm_mmcache.features.breaker import Breaker
from vllm_mmcache.features.remote import (
    FIRST_REST_S,
    LONGEST_REST_S,
    MAX_TIMEOUTS,
    WRITE_TIMEOUT_S,
    connect,
    open_value,
)
from vllm_mmcache.places import without_secrets
from vllm_mmcache.records.framing import FORMAT, HEAD_BYTES, MAX_VALUE_BYTES
from vllm_mmcache.records.place import Place
from vllm_mmcache.sealing import CLEAR, Clear

PREFIX = f"mmcache:records:{FORMAT}:"


class RemotePlace(Place):
    """The server at `url`. Units: entries live `ttl_s` from their last writing, 0 is for ever; a wait is `timeout_s`.

    Raises: SettingsError for a URL that redis-py does not take. Makes no connection until it is used.
    """

    name = "remote"
    failures = (Exception,)  # a server that is no Redis makes redis-py raise anything

    def __init__(
        self, url: str, *, ttl_s: int, timeout_s: float, rest_s: float = FIRST_REST_S, key: Clear = CLEAR
    ) -> None:
        shown = without_secrets(url)
        try:
            self._client = connect(url, timeout_s)
            self._writing_client = connect(url, max(timeout_s, WRITE_TIMEOUT_S))
        except Exception as error:
            raise SettingsError(f"{shown!r} is no URL of Redis or Valkey: {without_secrets(str(error))}") from None
        super().__init__(shown, rest_s, LONGEST_REST_S, key)
        self.ttl_s = ttl_s
        self._timeout_s = timeout_s

    def clear(self) -> None:
        """What others may use, too, expires."""

    def close(self) -> None:
        """Close the connections of both pools."""
        for client in (self._client, self._writing_client):
            client.connection_pool.disconnect()

    def _fail(self, breaker: Breaker, error: Exception) -> None:
        # What is left in a pooled connection could be taken for the answer to a later question.
        for client in (self._client, self._writing_client):
            client.connection_pool.disconnect(inuse_connections=False)
        super()._fail(breaker, error)

    def _load(self, key: bytes) -> tuple[bytes, float] | None:
        try:
            with open_value(self._client, PREFIX + key.hex(), self._timeout_s * MAX_TIMEOUTS) as value:
                if value is None:
                    return None
                most_bytes = self._key.num_bytes(HEAD_BYTES + MAX_VALUE_BYTES)
                framed = bytearray(min(value.num_bytes, most_bytes))
                value.read_into(0, memoryview(framed), monotonic() + self._timeout_s * MAX_TIMEOUTS)
        except StoreCorrupt:  # of another type, or cut meanwhile
            return b"", 0.0
        return bytes(framed), 0.0  # so it is written again, for another `ttl_s`

    def _save(self, frames: Mapping[bytes, bytes]) -> None:
        with self._writing_client.pipeline(transaction=False) as together:
            for key, framed in frames.items():
                together.set(PREFIX + key.hex(), framed, ex=self.ttl_s or None)
            together.execute()
