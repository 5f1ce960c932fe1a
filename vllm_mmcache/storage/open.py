# SPDX-License-Identifier: Apache-2.0
"""The tiers that the settings ask for: the one reader of the settings of the store. Any process."""

import logging

from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.base.settings import Settings, store_in_use
from vllm_mmcache.storage import encryption
from vllm_mmcache.storage.files import FileBackend
from vllm_mmcache.storage.kind import Kind
from vllm_mmcache.storage.sqlite import SqliteBackend
from vllm_mmcache.storage.tier import Tier

logger = logging.getLogger("vllm.mmcache")


def open_tiers(settings: Settings, kind: Kind, *, leaves_out: bool = False) -> list[Tier]:
    """The tiers beyond RAM of one kind, nearest first. A tier that can't be used now is used when it can be.

    leaves_out: whether a tier whose settings can't be used is left out with a line in the log. Raises: SettingsError
    otherwise, for a URL that is none of Redis or Valkey, and for a key that can't be used.
    """
    try:
        directory, url = store_in_use(settings)
        tiers = tiers_at(directory, None, settings, kind)
    except SettingsError as error:
        if not leaves_out:
            raise
        logger.warning("mmcache keeps %s in RAM alone: %s", kind.name, error)
        return []
    try:
        return tiers + tiers_at(None, url, settings, kind)
    except SettingsError as error:
        if not leaves_out:
            raise
        logger.warning("mmcache keeps no %s there: %s", kind.name, error)
        return tiers


def tiers_at(
    directory: str | None, url: str | None, settings: Settings, kind: Kind, *, timeout_s: float | None = None
) -> list[Tier]:
    """The tiers of one kind in these places, with the settings' budgets, times and key.

    timeout_s: of Redis or Valkey, where it is another one than the settings'. Raises: SettingsError.
    """
    codec = encryption.of(settings.store_key_file)
    tiers = []
    budget_bytes = getattr(settings, kind.disk_budget)
    if directory is not None and budget_bytes:
        on_disk = SqliteBackend if kind.is_small else FileBackend
        tiers.append(Tier(kind, on_disk(directory, kind, budget_bytes, ttl_s=settings.store_ttl), codec))
    if url is not None:
        from vllm_mmcache.storage.redis_backend import RedisBackend  # imports redis

        remote = RedisBackend(
            url,
            kind,
            ttl_s=settings.store_ttl,
            timeout_s=settings.store_remote_timeout_s if timeout_s is None else timeout_s,
            max_bytes=settings.store_remote_max_bytes,
        )
        tiers.append(Tier(kind, remote, codec))
    return tiers
