# SPDX-License-Identifier: Apache-2.0
"""The byte layout of KV block keys with cumulative image state: pure functions, no vLLM.

    root  = H(MAGIC || u32 block_size || NONE_HASH)
    key_i = H(parent || tokens || extras)              parent = key_{i-1}, or root for i = 0
    c_k   = SHA-256(c_{k-1} || u64 offset || u64 length || u32 len(id) || id)      c_{-1} = 32 zero bytes

H is SHA-256 (sha256) or XXH3-128 (xxhash). tokens are block_size signed 32-bit integers. All integers are little
endian, all strings UTF-8. extras are the fields that apply, in this order, each with a tag byte, so that no two
lists of extras have the same bytes: 1 image state (32 bytes), 2 LoRA name and path, 3 cache salt (first block only),
4 prompt-embeds digest (32 bytes); strings carry a u32 length. docs/block_keys.json has the test vectors.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from struct import Struct

import xxhash

MAGIC = b"vllm-mmcache block key 1\0"
NO_IMAGE = bytes(32)

_U32 = Struct("<I")
_POSITION = Struct("<QQI")
# The layout is little endian and array("i") is native: refuse to be silently different elsewhere.
_TOKENS_NATIVE = array("i", [1]).tobytes() == b"\x01\0\0\0"

Digest = Callable[[bytes], bytes]
ImagePosition = tuple[str, int, int]
"""(vLLM's identifier (mm_hash), offset in the prompt in tokens, length of the placeholder range in tokens)"""


def sha256_digest(message: bytes) -> bytes:
    """SHA-256, 32 bytes."""
    return hashlib.sha256(message, usedforsecurity=True).digest()


def xxhash_digest(message: bytes) -> bytes:
    """XXH3-128, 16 bytes. Not collision resistant: only below a secret root."""
    return xxhash.xxh3_128_digest(message)


def root_key(digest: Digest, block_size: int, none_hash: bytes) -> bytes:
    """The parent of every first block; binds the layout's version, the block size in tokens and vLLM's seed."""
    return digest(MAGIC + _U32.pack(block_size) + none_hash)


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as signed 32-bit little-endian integers. Raises: OverflowError for an id that does not fit."""
    tokens = array("i", token_ids)
    if not _TOKENS_NATIVE:
        tokens.byteswap()
    return tokens.tobytes()


def image_states(positions: Iterable[ImagePosition]) -> list[bytes]:
    """The cumulative state after each image, 32 bytes each, in prompt order."""
    states = []
    state = NO_IMAGE
    for identifier, offset, length in positions:
        encoded = identifier.encode()
        state = hashlib.sha256(state + _POSITION.pack(offset, length, len(encoded)) + encoded).digest()
        states.append(state)
    return states


def image_extra(state: bytes) -> bytes:
    """The extras field of the image state in force at the end of a block."""
    return b"\x01" + state


def lora_extra(name: str, path: str) -> bytes:
    """The extras field of a LoRA adapter."""
    return b"\x02" + _string(name) + _string(path)


def salt_extra(cache_salt: str) -> bytes:
    """The extras field of a cache salt; the first block's only, the chain carries it on."""
    return b"\x03" + _string(cache_salt)


def prompt_embeds_extra(embeds_digest: bytes) -> bytes:
    """The extras field of a block's prompt embeddings, a SHA-256 digest."""
    return b"\x04" + embeds_digest


def _string(text: str) -> bytes:
    encoded = text.encode()
    return _U32.pack(len(encoded)) + encoded
