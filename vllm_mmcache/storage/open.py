# SPDX-License-Identifier: Apache-2.0
"""The tiers that the settings ask for: the one reader of the settings of the store. Any process."""

import logging

from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.base.settings import Settings, store_in_use
from vllm_mmcache.storage import encryption
from vllm_mmcache.storage.encryption import PlainCodec
from vllm_mmcache.storage.files import FileBackend
from vllm_mmcache.storage.kind import Kind
from vllm_mmcache.storage.sqlite import SqliteBackend
from vllm_mmcache.storage.tier import Tier

logger = logging.getLogger("vllm.mmcache")


def open_tiers(settings: Settings, kind: Kind, *, leaves_out: bool = False) -> list[Tier]:
    """The tiers beyond RAM of one kind, nearest first. A tier that can't be used now is used when it can be.

    leaves_out: whether a wrong setting is a line in the log: for a URL the remote tier is left out, for a directory, a
    password's file or the file of the encryption key all tiers are. Otherwise it raises SettingsError.
    """
    tiers: list[Tier] = []
    try:
        directory, url = store_in_use(settings)
        codec = encryption.of(settings.store_key_file)
        if directory is not None and getattr(settings, kind.disk_budget):
            tiers.append(disk_tier(directory, settings, kind, codec))
    except SettingsError as error:
        if not leaves_out:
            raise
        logger.warning("mmcache keeps %s in RAM alone: %s", kind.name, error)
        return []
    try:
        if url is not None:
            tiers.append(remote_tier(url, settings, kind, codec, settings.store_remote_timeout_s))
    except SettingsError as error:
        if not leaves_out:
            raise
        logger.warning("mmcache keeps no %s there: %s", kind.name, error)
    return tiers


def disk_tier(directory: str, settings: Settings, kind: Kind, codec: PlainCodec) -> Tier:
    """The tier of one kind in a directory, with the settings' budget and time."""
    on_disk = SqliteBackend if kind.is_small else FileBackend
    backend = on_disk(directory, kind, getattr(settings, kind.disk_budget), ttl_s=settings.store_ttl)
    return Tier(kind, backend, codec)


def remote_tier(url: str, settings: Settings, kind: Kind, codec: PlainCodec, timeout_s: float) -> Tier:
    """The tier of one kind in Redis or Valkey, with the settings' time. Raises: SettingsError for such a URL."""
    from vllm_mmcache.storage.redis_backend import RedisBackend  # imports redis

    backend = RedisBackend(
        url, kind, ttl_s=settings.store_ttl, timeout_s=timeout_s, max_bytes=settings.store_remote_max_bytes
    )
    return Tier(kind, backend, codec)
