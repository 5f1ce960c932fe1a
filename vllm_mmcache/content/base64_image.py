# SPDX-License-Identifier: Apache-2.0
"""One image as base64 text, and the name of what it decodes to, without decoding it where the text is known.

API server process; any thread. A text's own BLAKE3 leads to the content id, the BLAKE3 of the bytes that the text
stands for. Both are cryptographic, so a client can't make its text stand for another's image; and both are keyed with
the tenant's key, so that a tenant's texts and images are known to that tenant alone.
"""

import threading

import pybase64

from vllm_mmcache.base import settings, tenant
from vllm_mmcache.base.lru import Budget, LruTable
from vllm_mmcache.metrics import table_sizes

TEXT_COST_BYTES = 512  # two digests of 32 bytes, their objects and the table's slot; test_lru.py measures it


def _budget() -> Budget:
    return Budget(settings.current().media_records, settings.current().media_records_bytes)


CONTENT_IDS: LruTable[bytes, bytes] = LruTable(_budget, TEXT_COST_BYTES)  # digest of the text -> content id
table_sizes.of_server("texts", CONTENT_IDS.size)


class Base64Image:
    """Base64 text that is known to be valid.

    Raises: ValueError on construction (binascii.Error is one) where the text is not valid base64.
    """

    def __init__(self, text: bytes | memoryview, tenant_key: bytes | None = None) -> None:
        self.text = text
        self._content: bytes | None = None
        self._lock = threading.Lock()
        name = tenant.digest(text, tenant_key)
        known = CONTENT_IDS.get(name)
        if known is None:
            self._content = pybase64.b64decode(text, validate=True)
            known = CONTENT_IDS.admit(name, tenant.digest(self._content, tenant_key))
        self.content_id = known

    def decode(self) -> bytes:
        """The bytes that the text stands for; base64 is decoded at most once."""
        with self._lock:
            if self._content is None:
                self._content = pybase64.b64decode(self.text, validate=True)
            return self._content
