# SPDX-License-Identifier: Apache-2.0
"""Whose request this is: the cache_salt of the request that is being worked on, and a key made of it.

API server process. The salt lives in a context variable, which follows a request through its tasks; identity/ sets it
and carries it into vLLM's threads. What a room keeps about images, it keeps under the tenant's key.
"""

from contextvars import ContextVar

from blake3 import blake3

SALT: ContextVar[str | None] = ContextVar("mmcache_salt", default=None)

_CONTEXT = "vllm-mmcache tenant 1"


def key_of(salt: str | None) -> bytes | None:
    """32 bytes that stand for a tenant; None for all requests without a salt. Raises: UnicodeEncodeError."""
    return blake3(salt.encode(), derive_key_context=_CONTEXT).digest() if salt else None


def digest(content: bytes | memoryview, key: bytes | None) -> bytes:
    """BLAKE3 of `content`, 32 bytes, keyed with the tenant's key, so that no two tenants share a digest."""
    return (blake3(content) if key is None else blake3(content, key=key)).digest()
