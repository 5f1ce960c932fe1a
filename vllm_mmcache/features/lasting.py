# SPDX-License-Identifier: Apache-2.0
"""What the tiers that outlive the process have in common: packages as bytes, checked on every read.

`load` runs in the thread of the request, `save` in the store's writer thread. Whatever goes wrong is a miss, or a
package that is not kept: it is counted, and the tier is left alone for a while. Neither ever raises.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from vllm_mmcache.errors import StoreCorrupt
from vllm_mmcache.features.breaker import Breaker
from vllm_mmcache.features.counters import Counters
from vllm_mmcache.features.identity import Identity
from vllm_mmcache.features.package import Package, unpack

logger = logging.getLogger("vllm.mmcache")

Misfit = Callable[[Package], str]
"""Says why a package that is whole can't be what was asked for; empty where it can."""


class LastingTier(ABC):
    """A tier of packages as bytes. A subclass reads, writes and rejects; this class checks, counts and gives up."""

    name: str
    max_bytes: int
    failures: tuple[type[Exception], ...]
    """What reading and writing may raise when the tier can't serve."""

    def __init__(self, reading: Breaker, writing: Breaker) -> None:
        self.counters = Counters(self.name)
        self._reading = reading
        self._writing = writing

    def load(self, identity: Identity, misfit: Misfit | None = None) -> Package | None:
        """The package of exactly this identity, with every byte checked, and its content by `misfit`."""
        if self._reading.resting():
            self.counters.add(misses=1)
            return None
        start = time.perf_counter()
        package = self._checked(identity, misfit)
        self.counters.add(
            hits=package is not None,
            misses=package is None,
            read_bytes=package.num_bytes if package else 0,
            load_s=time.perf_counter() - start,
        )
        return package

    def has(self, identity: Identity) -> bool:
        """Whether there is something under the key. A hint: only `load` looks at it."""
        if self._reading.resting():
            return False
        try:
            return self._holds(identity.key)
        except self.failures as error:
            self._fail(self._reading, error)
            return False

    def save(self, key: str, packed: bytes) -> None:
        """Keep a packed package under its key."""
        if len(packed) > self.max_bytes or self._writing.resting():
            self.counters.add(dropped=1)
            return
        start = time.perf_counter()
        try:
            self._write(key, packed)
        except self.failures as error:
            self._fail(self._writing, error)
            return
        self._writing.worked()
        self.counters.add(saved=1, saved_bytes=len(packed), save_s=time.perf_counter() - start)

    def _checked(self, identity: Identity, misfit: Misfit | None) -> Package | None:
        try:
            try:
                packed = self._read(identity.key)
                self._reading.worked()
                if packed is None:
                    return None
                package = unpack(packed, identity)[1]
                if misfit is not None and (how := misfit(package)):
                    raise StoreCorrupt(how)
                return package
            except StoreCorrupt as error:
                log = logger.debug if self.counters.snapshot()["set_aside"] else logger.warning
                log("mmcache %s set aside %s: %s (further ones at log level debug)", self.name, identity.key, error)
                self.counters.add(set_aside=1)
                self._reject(identity.key)
        except self.failures as error:
            self._fail(self._reading, error)
        return None

    def _fail(self, breaker: Breaker, error: Exception) -> None:
        self.counters.add(errors=1)
        breaker.failed(error)

    @abstractmethod
    def _read(self, key: str) -> bytes | None:
        """The bytes under `key`; None for a miss. Raises: StoreCorrupt, or one of `failures`."""

    @abstractmethod
    def _holds(self, key: str) -> bool:
        """Whether there are bytes under `key`. Raises: one of `failures`."""

    @abstractmethod
    def _write(self, key: str, packed: bytes) -> None:
        """Put bytes under `key`. Raises: one of `failures`."""

    @abstractmethod
    def _reject(self, key: str) -> None:
        """Take what lies under `key` out of service. Raises: one of `failures`."""
