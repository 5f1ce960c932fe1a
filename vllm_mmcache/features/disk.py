# SPDX-License-Identifier: Apache-2.0
"""The second tier: packages in a directory of this machine, which several processes use and a restart keeps.

A disk that is full or read-only is tried again later, and what can still be read is still served.
"""

from pathlib import Path

from vllm_mmcache.errors import StoreUnusable
from vllm_mmcache.features.breaker import Breaker
from vllm_mmcache.features.directory import Directory
from vllm_mmcache.features.lasting import LastingTier

FIRST_REST_S = 30.0
LONGEST_REST_S = 600.0


class DiskTier(LastingTier):
    """The store in `place`, up to `budget_bytes` of files."""

    name = "disk"
    failures = (OSError, StoreUnusable)

    def __init__(self, place: str | Path, budget_bytes: int, rest_s: float = FIRST_REST_S) -> None:
        super().__init__(
            reading=Breaker(f"feature store {place} (reading)", rest_s, LONGEST_REST_S),
            writing=Breaker(f"feature store {place} (writing)", rest_s, LONGEST_REST_S),
        )
        self.directory = Directory(place)
        self.max_bytes = budget_bytes

    def _read(self, key: str) -> bytes | None:
        return self.directory.read(key, self.max_bytes)

    def _holds(self, key: str) -> bool:
        return self.directory.is_there() and self.directory.path_of(key).exists()

    def _write(self, key: str, packed: bytes) -> None:
        held, evicted = self.directory.write(key, packed, self.max_bytes)
        self.counters.add(evictions=evicted)
        self.counters.hold(held)

    def _reject(self, key: str) -> None:
        self.directory.set_aside(key)
