# SPDX-License-Identifier: Apache-2.0
"""Computes identifiers, which become vLLM's mm_hash: pure functions, no vLLM.

    identifier = content id                                                 without salt and arguments
    identifier = hex BLAKE3("vllm-mmcache identity 1" 00 || fields)          otherwise
    identifier = marker || the first 48 digits of that                      for an image that Dynamo has named
    fields     = kind, modality, content id, arguments, salt; each as u32 length || UTF-8 bytes

The content id is the digest that vLLM's hasher gives for the item alone: of its file's bytes, or of its mode, shape,
dtype and pixels, framed. The arguments are the request's processor and loader arguments as canonical text. Lengths
are little endian. docs/identity.json has the test vectors.
"""

import json
from collections.abc import Mapping, Sequence
from struct import Struct

from blake3 import blake3

MAGIC = b"vllm-mmcache identity 1\0"

CONTENT = "content"
NAME = "name"  # an id that a client made, where vLLM instances find each other's items by it
UNKNOWN = "unknown"  # stands for nothing: no item is ever kept under it
ALIAS = "alias"  # not an identifier: the key of an alias

_U32 = Struct("<I")


def identifier(modality: str, content_id: str, arguments: str = "", salt: str | None = None, marker: str = "") -> str:
    """The mm_hash of an item: without salt and arguments the content id, which is stock's mm_hash; else 64 hex digits.

    marker: hex digits that the mm_hash is to begin with. Whoever has chosen them has no say in the other digits, which
    are a digest of the content. Raises: UnicodeEncodeError for half of a surrogate pair in an argument.
    """
    if not arguments and not salt and not marker:
        return content_id
    digest = _digest(CONTENT, modality, content_id, arguments, salt or "").hex()
    return marker + digest[: len(digest) - len(marker)]


def name_identifier(modality: str, name: str, arguments: str = "", salt: str | None = None) -> str:
    """The mm_hash of an item that is known by a name alone, in a deployment whose instances share names."""
    return _digest(NAME, modality, name, arguments, salt or "").hex() if arguments or salt else name


def unknown_identifier(modality: str, name: str, salt: str | None = None) -> str:
    """The identifier for a name that its tenant has not bound: it is looked up like any other, and never found."""
    return _digest(UNKNOWN, modality, name, "", salt or "").hex()


def alias_key(modality: str, name: str, salt: str | None = None) -> bytes:
    """The key of a tenant's alias, 32 bytes."""
    return _digest(ALIAS, modality, name, "", salt or "")


def canonical(value: object) -> str:
    """Text that differs for values whose bytes can be equal: 1, 1.0, true and a string of the same bytes.

    For a value that JSON can't express, it is the type alone: vLLM's own hash covers the rest.
    """
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{canonical(key)}:{canonical(one)}" for key, one in value.items())) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return "[" + ",".join(map(canonical, value)) + "]"
    if value is None or isinstance(value, bool | int | float | str):
        return json.dumps(value)
    return f"<{type(value).__module__}.{type(value).__qualname__}>"


def _digest(*fields: str) -> bytes:
    parts = [MAGIC]
    for field in fields:
        encoded = field.encode()
        parts += _U32.pack(len(encoded)), encoded
    return blake3(b"".join(parts)).digest()
