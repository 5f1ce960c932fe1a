# SPDX-License-Identifier: Apache-2.0
"""The store of encoder outputs: asks RAM, then the disk, then Redis or Valkey, and fills the tiers above a hit.

A worker opens one store and keeps it. `load` runs in the thread of the request and waits for no writer; `save` puts
the package into RAM at once and leaves the rest to the writer thread. Neither ever raises because of a tier.
"""

from collections.abc import Sequence

from vllm_mmcache.features.identity import Identity
from vllm_mmcache.features.lasting import LastingTier, Misfit
from vllm_mmcache.features.package import Package
from vllm_mmcache.features.ram import RamTier
from vllm_mmcache.features.writer import Job, Writer
from vllm_mmcache.settings import Settings, store_places

QUEUE_BYTES = 256 * 1024**2
# A header holds the identity as a whole; our own content ids have 64 characters.
MAX_CONTENT_ID_CHARS = 16 * 1024


class Store:
    """Packages by identity over a RAM tier and the tiers below it, nearest first. Any thread."""

    def __init__(self, ram: RamTier, below: Sequence[LastingTier] = (), queue_bytes: int = QUEUE_BYTES) -> None:
        self.ram = ram
        self.below = tuple(below)
        self._tiers: tuple[RamTier | LastingTier, ...] = (ram, *below)
        self._writer = Writer(queue_bytes)

    def find(self, identity: Identity, misfit: Misfit | None = None) -> tuple[Package | None, str]:
        """The package of exactly this identity from the nearest tier that has it, and the tier's name; else None, "".

        misfit says why a package can't be what was asked for, or nothing; such a one is a miss, and is set aside.
        Its tensors are on the CPU, and nobody may write into them.
        """
        package = self.ram.load(identity)
        if package is not None or not _storable(identity):
            return package, self.ram.name if package is not None else ""
        for index, tier in enumerate(self.below):
            package = tier.load(identity, misfit)
            if package is not None:
                self._keep(identity, package, self.below[:index])
                return package, tier.name
        return None, ""

    def has(self, identity: Identity) -> bool:
        """Whether some tier has something under this identity's key. A hint: only `find` checks the package."""
        return _storable(identity) and any(tier.has(identity) for tier in self._tiers)

    def save(self, identity: Identity, package: Package) -> None:
        """Keep a package in every tier: in RAM at once, in the others soon. Dropped, and counted, if it can't be."""
        if _storable(identity):
            self._keep(identity, package, self.below)
        else:
            self.ram.counters.add(dropped=1)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was saved is written or given up. Returns False after `timeout_s`."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Flush, and end the writer thread; what is saved later stays in RAM only. Returns what `flush` did."""
        return self._writer.close(timeout_s)

    def counts(self) -> dict[str, dict[str, float]]:
        """The counts of each tier, by the tier's name; see `counters.Counts`."""
        return {tier.name: tier.counters.snapshot() for tier in self._tiers}

    def _keep(self, identity: Identity, package: Package, below: Sequence[LastingTier]) -> None:
        self.ram.save(identity, package)
        if below:
            self._writer.hand(Job(identity, package, below))


def open_store(settings: Settings) -> Store:
    """The store that the settings describe. A tier that can't be used now is used when it can be.

    Raises: SettingsError for a URL that is none of Redis or Valkey.
    """
    directory, url = store_places(settings.store)
    below: list[LastingTier] = []
    if directory is not None:
        from vllm_mmcache.features.disk import DiskTier

        below.append(DiskTier(directory, settings.store_disk_bytes))
    if url is not None:
        from vllm_mmcache.features.remote import RemoteTier  # imports redis

        below.append(
            RemoteTier(
                url,
                ttl_s=settings.store_remote_ttl_s,
                max_bytes=settings.store_remote_max_bytes,
                timeout_s=settings.store_remote_timeout_s,
            )
        )
    return Store(RamTier(settings.feature_ram_bytes), below)


def _storable(identity: Identity) -> bool:
    return len(identity.content_id) <= MAX_CONTENT_ID_CHARS
