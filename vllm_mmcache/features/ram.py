# SPDX-License-Identifier: Apache-2.0
"""The first tier: packages in this process's memory, those used longest ago let go first.

A hit hands out the very tensors that were saved, so nobody may write into them. Any thread of one process.
"""

import threading
from collections import OrderedDict

from vllm_mmcache.features.counters import Counters
from vllm_mmcache.features.identity import Identity
from vllm_mmcache.features.package import Package


class RamTier:
    """Packages up to `budget_bytes` of tensors; a package larger than that is not kept."""

    name = "ram"

    def __init__(self, budget_bytes: int) -> None:
        self.counters = Counters(self.name)
        self._budget_bytes = budget_bytes
        self._packages: OrderedDict[str, tuple[Identity, Package]] = OrderedDict()
        self._held_bytes = 0
        self._lock = threading.Lock()

    def load(self, identity: Identity) -> Package | None:
        """The package of exactly this identity, which is then the one used last."""
        with self._lock:
            found = self._packages.get(identity.key)
            if found is not None and found[0] == identity:
                self._packages.move_to_end(identity.key)
                self.counters.add(hits=1, read_bytes=found[1].num_bytes)
                return found[1]
        self.counters.add(misses=1)
        return None

    def has(self, identity: Identity) -> bool:
        """Whether `load` would find it now; counts nothing."""
        with self._lock:
            found = self._packages.get(identity.key)
        return found is not None and found[0] == identity

    def save(self, identity: Identity, package: Package) -> None:
        """Keep a package, letting older ones go."""
        if package.num_bytes > self._budget_bytes:
            self.counters.add(dropped=1)
            return
        evictions = 0
        with self._lock:
            if before := self._packages.pop(identity.key, None):
                self._held_bytes -= before[1].num_bytes
            self._packages[identity.key] = (identity, package)
            self._held_bytes += package.num_bytes
            while self._held_bytes > self._budget_bytes:
                _, (_, oldest) = self._packages.popitem(last=False)
                self._held_bytes -= oldest.num_bytes
                evictions += 1
            self.counters.hold(self._held_bytes)
        self.counters.add(saved=1, saved_bytes=package.num_bytes, evictions=evictions)

    def clear(self) -> None:
        """Let every package go."""
        with self._lock:
            self._packages.clear()
            self._held_bytes = 0
            self.counters.hold(0)
