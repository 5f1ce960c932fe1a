# SPDX-License-Identifier: Apache-2.0
"""How salts and images are told apart without being told. API server and engine; pure.

A salt is compared as a digest of all of it, which stays in the processes. What a record shows is short, and keyed with
the admin key, so that nobody can try which salt or which image it stands for, while all API servers that have that key
show one thing alike. Without an admin key each process has a key of its own.
"""

import hashlib
import secrets
from functools import cache

from vllm_mmcache.base import settings
from vllm_mmcache.components.observe.page.admin import admin_key
from vllm_mmcache.components.observe.record.schema import DIGEST_CHARS


def salt_class(salt: str | None) -> str:
    """What two requests have in common whose cache_salts are equal; empty without a salt. 64 hex digits else."""
    return hashlib.blake2b(_bytes(salt), digest_size=32).hexdigest() if salt else ""


def shown(text: str) -> str:
    """A digest for a record: of a salt's class, or of an image's identifier. 8 hex digits."""
    key = _key(admin_key(settings.current()))
    return hashlib.blake2b(_bytes(text), digest_size=DIGEST_CHARS // 2, key=key).hexdigest()


@cache
def _key(admin: str | None) -> bytes:
    """One key for each admin key, and one for this process alone."""
    return hashlib.blake2b(_bytes(admin or secrets.token_hex(32)), digest_size=32, person=b"mmcache digests").digest()


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
