# SPDX-License-Identifier: Apache-2.0
"""Whose media a loader of vLLM opens: it is made in the request's task and used in a thread that knows no request.

API server process.
"""

from typing import Any

from vllm_mmcache.base import tenant

_KEY = "_mmcache_tenant_key"


def remember(loader: Any) -> None:
    """Note on a loader that was just made whose request this is."""
    setattr(loader, _KEY, tenant.key_of(tenant.SALT.get()))


def key_of(loader: Any) -> bytes | None:
    """Whose image this is; None without a tenant, and where identity is off."""
    key: bytes | None = getattr(loader, _KEY, None)
    return key
