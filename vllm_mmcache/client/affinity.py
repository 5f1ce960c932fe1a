# SPDX-License-Identifier: Apache-2.0
"""A name for a conversation, made of its images, by which a router sends its requests to the same replica.

The client's process, any thread. The name is a keyed digest, since routers write it to their logs: without the key,
nobody who reads these can try whether it is that of a picture.
"""

from collections.abc import Sequence

from blake3 import blake3

from vllm_mmcache.base.lru import Budget, LruTable

HEADER = "x-session-id"
"""What vllm-router and smg hash in their modes for consistent hashing, and Ray Serve's consistent-hash router reads."""

_CONTEXT = "vllm-mmcache 2026 client affinity"
_NAME_BYTES = 16
_ENTRY_BYTES = 512
_MAX_IMAGES = 65536


class Affinity:
    """The names of conversations. May be shared by several transports.

    A conversation is named after the first image that it is seen with, and keeps the name when a later request has lost
    that image and still has another one of the conversation.
    """

    def __init__(self, headers: str | Sequence[str] = HEADER, key: str | bytes = b"") -> None:
        """All `headers` get the name. `key` is added to the API key: give one where the API key is no secret.

        It has to be the same for all clients whose requests about an image should meet.
        """
        self.headers = (headers,) if isinstance(headers, str) else tuple(headers)
        self._key = key.encode() if isinstance(key, str) else key
        self._names: LruTable[tuple[bytes, str], str] = LruTable(
            lambda: Budget(_MAX_IMAGES, _MAX_IMAGES * _ENTRY_BYTES), _ENTRY_BYTES
        )

    def name_of(self, tenant: bytes, images: Sequence[str]) -> str:
        """The name of the conversation with these images. Units: hexadecimal digits, 32 of them."""
        tenant_key = blake3(self._key + b"\0" + tenant, derive_key_context=_CONTEXT).digest()
        known = (self._names.get((tenant_key, image)) for image in images)
        name = next(filter(None, known), None)
        if name is None:
            name = blake3(images[0].encode(), key=tenant_key).hexdigest(_NAME_BYTES)
        for image in images:
            self._names.admit((tenant_key, image), name)
        return name
