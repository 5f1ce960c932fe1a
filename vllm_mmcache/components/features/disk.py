# SPDX-License-Identifier: Apache-2.0
"""The second tier: packages in a directory of this machine, which several processes use and a restart keeps.

A disk that is full or read-only is tried again later, and what can still be read is still served. Engine
process; reader and writer threads.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from vllm_mmcache.base.errors import StoreUnusable
from vllm_mmcache.base.lru import Size
from vllm_mmcache.components.features.directory import Directory, OpenFile
from vllm_mmcache.components.features.lasting import LastingTier
from vllm_mmcache.components.features.package import Buffer
from vllm_mmcache.storage.breaker import Breaker
from vllm_mmcache.storage.encryption import PLAIN, PlainCodec

FIRST_REST_S = 30.0
LONGEST_REST_S = 600.0
# One package must not push all others out.
SHARE = 4


class DiskTier(LastingTier):
    """The store in `place`, up to `budget_bytes` of files, one package up to a quarter of that.

    Units: what was not used for `ttl_s` is removed, each hour that somebody has the store open; 0 for never.
    """

    name = "disk"
    failures = (OSError, StoreUnusable)

    def __init__(
        self,
        place: str | Path,
        budget_bytes: int,
        *,
        ttl_s: int = 0,
        rest_s: float = FIRST_REST_S,
        codec: PlainCodec = PLAIN,
    ) -> None:
        super().__init__(
            reading=Breaker(f"feature store {place} (reading)", rest_s, LONGEST_REST_S),
            writing=Breaker(f"feature store {place} (writing)", rest_s, LONGEST_REST_S),
            codec=codec,
        )
        self.directory = Directory(place, ttl_s)
        self.ttl_s = ttl_s
        self.max_bytes = budget_bytes // SHARE
        self._budget_bytes = budget_bytes

    def size(self) -> Size:
        """As LastingTier says."""
        return Size(bytes=int(self.counters.snapshot()["held_bytes"]), budget_bytes=self._budget_bytes)

    def _open(self, name: str) -> AbstractContextManager[OpenFile | None]:
        return self.directory.open(name)

    def _renew(self, name: str) -> bool:
        return self.directory.renew(name)

    def _write(self, name: str, parts: Iterable[Buffer], num_bytes: int) -> None:
        held, evicted = self.directory.write(name, parts, num_bytes, self._budget_bytes)
        self.counters.add(evictions=evicted)
        self.counters.hold(held)

    def _tidy(self) -> None:
        if self.ttl_s and self.directory.is_there():
            held, evicted = self.directory.sweep(self._budget_bytes)
            self.counters.add(evictions=evicted)
            self.counters.hold(held)

    def _reject(self, name: str) -> None:
        self.directory.set_aside(name)
