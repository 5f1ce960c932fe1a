# SPDX-License-Identifier: Apache-2.0
"""The keys of small values, and the frames in which the values are stored. Any process, any thread.

A frame is `mmcr`, one byte of format, a BLAKE3 digest over key and value, and the value. It shows whether the value was
cut, changed, moved to another key or written in another format. The digest depends on no secret: whoever can write to
the place where records are stored can write a valid frame, and must be as trusted as the servers are.
"""

from blake3 import blake3

from vllm_mmcache.base.errors import StoreCorrupt

MAX_VALUE_BYTES = 64 * 1024
"""A larger value is not kept."""

FORMAT = 1
"""The frames' format: raise it when their bytes change. It is in every key, so no version finds frames of another
format. The meaning of a value has a number of its own for each kind of record, among the fields of the key."""

_MAGIC = b"mmcr%c" % FORMAT
_DIGEST_BYTES = 32
HEAD_BYTES = len(_MAGIC) + _DIGEST_BYTES
_KEY_CONTEXT = f"vllm-mmcache record key {FORMAT}"
_FRAME_CONTEXT = f"vllm-mmcache record frame {FORMAT}"


def key(kind: str, *fields: str | bytes) -> bytes:
    """The key, 32 bytes, of a record of that kind about these fields, in this order.

    Every field counts with its length and its type, so no two lists of fields share a key. Raises: UnicodeEncodeError.
    """
    hasher = blake3(derive_key_context=_KEY_CONTEXT)
    for field in (kind, *fields):
        content = field.encode() if isinstance(field, str) else field
        hasher.update(b"%c%d:" % (b"s"[0] if isinstance(field, str) else b"b"[0], len(content)))
        hasher.update(content)
    return hasher.digest()


def frame(key: bytes, value: bytes) -> bytes:
    """The frame of `value` for `key`, which is HEAD_BYTES longer."""
    return b"".join((_MAGIC, _digest(key, value), value))


def unframe(key: bytes, framed: bytes) -> bytes | None:
    """The value in a frame; None for anything that is no whole frame for `key`."""
    value = framed[HEAD_BYTES:]
    return value if framed[:HEAD_BYTES] == _MAGIC + _digest(key, value) else None


def check(key: bytes, framed: bytes | bytearray) -> None:
    """Raises: StoreCorrupt for anything that is no whole frame for `key`."""
    if unframe(key, bytes(framed)) is None:
        raise StoreCorrupt("no whole record of this key")


def _digest(key: bytes, value: bytes) -> bytes:
    return blake3(b"%d:" % len(key) + key + value, derive_key_context=_FRAME_CONTEXT).digest()
