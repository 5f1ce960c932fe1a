# SPDX-License-Identifier: Apache-2.0
"""Where this process finds tenants, by the settings in force. API server process, command line; imports no vLLM."""

from functools import lru_cache

from vllm_mmcache.base import settings, tenant
from vllm_mmcache.base.key_file import read_32_bytes


def configured_source() -> tenant.TenantSource:
    """The source of tenants that the settings tenant_from and tenant_key_file ask for.

    Raises: SettingsError for a key file that can't be used; the start of a server has looked at it before.
    """
    chosen = settings.current()
    return _source(chosen.tenant_from, chosen.tenant_key_file)


@lru_cache(maxsize=4)
def _source(text: str, key_file: str | None) -> tenant.TenantSource:
    return tenant.parse_source(text, b"" if key_file is None else read_32_bytes(key_file, "tenant_key_file"))
