# SPDX-License-Identifier: Apache-2.0
"""Encryption at rest: what goes to a directory, Redis or Valkey, under a key from a file, and what comes back.

    head    MAGIC, 8 bytes that tell keys apart
    chunk   12 bytes of nonce, ciphertext of up to CHUNK_BYTES, 16 bytes of tag     (one or more)

AES-256-GCM, each chunk with a random nonce. It is bound to the name that all of it lies under, to its place and to the
length of the whole, so what was changed, cut, moved, put together or sealed with another key is known for that. Names
are keyed, too: without the key nobody can tell whose they are. PLAIN does nothing of this. Any process, any thread;
imports `cryptography` (the extra `encryption`) only where there is a key.
"""

import os
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Protocol

from blake3 import blake3

from vllm_mmcache.base.errors import StoreCorrupt, StoreKeyMismatch
from vllm_mmcache.base.key_file import read_key

MAGIC = b"mmcseal1"
CHUNK_BYTES = 1024**2
"""So much is opened at a time, and held in memory beside what it is for."""
NONCE_BYTES, TAG_BYTES = 12, 16
HEAD_BYTES = len(MAGIC) + 8

_PLACE = Struct("<QQ")
_SEALED_CHUNK_BYTES = CHUNK_BYTES + NONCE_BYTES + TAG_BYTES

Buffer = bytes | bytearray | memoryview


class Source(Protocol):
    """Bytes where they lie."""

    num_bytes: int

    def read_into(self, offset: int, buffer: memoryview, until: float) -> None:
        """Fill `buffer` with the bytes from `offset`. Raises: StoreCorrupt where there are fewer; others.

        until: the time by time.monotonic() when one that waits gives up.
        """

    def is_current(self) -> bool:
        """Whether what was read is still what lies there."""


class PlainCodec:
    """No key: everything stays as it is."""

    def name(self, key: bytes) -> bytes:
        """The name under which something lies, by its key."""
        return key

    def num_bytes(self, content_bytes: int) -> int:
        """How many bytes `parts` has for so many."""
        return content_bytes

    def parts(self, name: bytes, content: Iterable[Buffer], content_bytes: int) -> Iterator[Buffer]:
        """`content`, in parts that follow each other, as it lies under `name`; one holds until the next one comes."""
        yield from content

    def opened(self, source: Source, name: bytes) -> Source:
        """The content of what lies under `name`.

        Reading it raises StoreKeyMismatch for what was encrypted with another key, StoreCorrupt for what is damaged.
        """
        return _Unsealed(source)

    def encrypt(self, name: bytes, content: bytes) -> bytes:
        """`content` as it lies under `name`."""
        sealed = bytearray()
        for part in self.parts(name, [content], len(content)):
            sealed += part
        return bytes(sealed)

    def decrypt(self, name: bytes, sealed: bytes) -> bytes:
        """What `encrypt` was given. Raises: as `opened`."""
        source = self.opened(_Bytes(sealed), name)
        content = bytearray(source.num_bytes)
        source.read_into(0, memoryview(content), 0.0)
        return bytes(content)

    def has_other_key(self, first: bytes) -> bool:
        """Whether something that begins so was sealed, and not with this key."""
        return first.startswith(MAGIC)


PLAIN = PlainCodec()


class AesGcmCodec(PlainCodec):
    """Encrypted with AES-256-GCM, in chunks of CHUNK_BYTES, under keys derived from a secret of KEY_BYTES.

    Raises: ImportError where `cryptography` is not installed; `read_key` has looked before.
    """

    def __init__(self, secret: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        def derived(what: str) -> bytes:
            return blake3(secret, derive_key_context=f"vllm-mmcache sealing 1 {what}").digest()

        self._cipher = AESGCM(derived("content"))
        self._names = derived("names")
        self._head = MAGIC + derived("key")[: HEAD_BYTES - len(MAGIC)]

    def name(self, key: bytes) -> bytes:
        """32 bytes, the BLAKE3 of `key` under the secret: without the secret nobody can tell whose name it is."""
        return blake3(key, key=self._names).digest()

    def num_bytes(self, content_bytes: int) -> int:
        """The content's bytes, those of the head, and NONCE_BYTES + TAG_BYTES for each chunk of CHUNK_BYTES."""
        return HEAD_BYTES + content_bytes + _num_chunks(content_bytes) * (NONCE_BYTES + TAG_BYTES)

    def parts(self, name: bytes, content: Iterable[Buffer], content_bytes: int) -> Iterator[Buffer]:
        """The head, then each chunk: nonce, AES-256-GCM text and tag, bound to `name`, its number and `content_bytes`.

        All chunks are the same memory, used again.
        """
        yield self._head
        # Used again and again: memory that is new takes longer to get than to encrypt.
        room = memoryview(bytearray(min(content_bytes, CHUNK_BYTES) + NONCE_BYTES + TAG_BYTES))
        for index, chunk in enumerate(_chunks(content, min(content_bytes, CHUNK_BYTES))):
            sealed = room[: len(chunk) + NONCE_BYTES + TAG_BYTES]
            sealed[:NONCE_BYTES] = nonce = os.urandom(NONCE_BYTES)
            place = name + _PLACE.pack(index, content_bytes)
            self._cipher.encrypt_into(nonce, chunk, place, sealed[NONCE_BYTES:])
            yield sealed

    def opened(self, source: Source, name: bytes) -> Source:
        """The content of a sealed source, decrypted as it is read; nothing is read before. Raises: as Clear's."""
        return _Opened(source, name, self)

    def has_other_key(self, first: bytes) -> bool:
        """Whether it begins with MAGIC, and not with this key's head; what is not sealed is not foreign."""
        return first.startswith(MAGIC) and first[:HEAD_BYTES] != self._head

    def check_head(self, first: bytes) -> None:
        """Look at the first HEAD_BYTES.

        Raises: StoreKeyMismatch for another key's, StoreCorrupt for what is no head.
        """
        if self.has_other_key(first):
            raise StoreKeyMismatch("sealed with another key")
        if first != self._head:
            raise StoreCorrupt("not sealed")

    def open_chunk(self, name: bytes, index: int, content_bytes: int, sealed: memoryview, into: memoryview) -> None:
        """Fill `into` with what is in a chunk. Raises: StoreCorrupt.

        sealed: nonce, text and tag. into: NONCE_BYTES + TAG_BYTES less. content_bytes: of the whole, all chunks.
        """
        from cryptography.exceptions import InvalidTag

        nonce, rest = bytes(sealed[:NONCE_BYTES]), sealed[NONCE_BYTES:]
        try:
            self._cipher.decrypt_into(nonce, rest, name + _PLACE.pack(index, content_bytes), into)
        except InvalidTag:
            raise StoreCorrupt("what is sealed was changed, or belongs under another name") from None


class _Unsealed:
    """A source as it is, unless it is sealed."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.num_bytes = source.num_bytes

    def read_into(self, offset: int, buffer: memoryview, until: float) -> None:
        self._source.read_into(offset, buffer, until)
        if offset == 0 and PLAIN.has_other_key(bytes(buffer[: len(MAGIC)])):
            raise StoreKeyMismatch("sealed: MMCACHE_STORE_KEY_FILE names the key")

    def is_current(self) -> bool:
        return self._source.is_current()


class _Opened:
    """The content of a sealed source, from any offset; keeps the chunk that was read last."""

    def __init__(self, source: Source, name: bytes, key: AesGcmCodec) -> None:
        self._source, self._name, self._key = source, name, key
        chunks_bytes = source.num_bytes - HEAD_BYTES
        num_chunks = -(-chunks_bytes // _SEALED_CHUNK_BYTES)
        self.num_bytes = chunks_bytes - num_chunks * (NONCE_BYTES + TAG_BYTES)
        self._is_possible = self.num_bytes >= 0 and num_chunks == _num_chunks(self.num_bytes)
        if not self._is_possible:
            self.num_bytes = 0
        self._room = memoryview(bytearray(min(source.num_bytes, HEAD_BYTES + _SEALED_CHUNK_BYTES)))
        self._content = memoryview(bytearray(min(self.num_bytes, CHUNK_BYTES)))
        self._last = -1, self._content[:0]

    def read_into(self, offset: int, buffer: memoryview, until: float) -> None:
        if not self._is_possible or not (buffer or self.num_bytes):
            self._chunk(0, until)  # that there is nothing in it must be sealed, too
        while buffer:
            index, start = divmod(offset, CHUNK_BYTES)
            piece = self._chunk(index, until)[start : start + len(buffer)]
            if not piece:
                raise StoreCorrupt(f"it ends at byte {offset}")
            buffer[: len(piece)] = piece
            buffer, offset = buffer[len(piece) :], offset + len(piece)

    def is_current(self) -> bool:
        return self._source.is_current()

    def _chunk(self, index: int, until: float) -> memoryview:
        if self._last[0] != index:
            # The head comes with the first one.
            start = HEAD_BYTES + index * _SEALED_CHUNK_BYTES if index else 0
            end = min(HEAD_BYTES + (index + 1) * _SEALED_CHUNK_BYTES, self._source.num_bytes)
            sealed = self._room[: max(0, end - start)]
            self._source.read_into(start, sealed, until)
            if not index:
                self._key.check_head(bytes(sealed[:HEAD_BYTES]))
                sealed = sealed[HEAD_BYTES:]
            if not self._is_possible or len(sealed) < NONCE_BYTES + TAG_BYTES:
                raise StoreCorrupt(f"it ends at byte {self._source.num_bytes}")
            content = self._content[: len(sealed) - NONCE_BYTES - TAG_BYTES]
            self._last = -1, content
            self._key.open_chunk(self._name, index, self.num_bytes, sealed, content)
            self._last = index, content
        return self._last[1]


class _Bytes:
    """A source in memory."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.num_bytes = len(content)

    def read_into(self, offset: int, buffer: memoryview, until: float) -> None:
        buffer[:] = self._content[offset : offset + len(buffer)]

    def is_current(self) -> bool:
        return True


def of(key_file: str | None) -> PlainCodec:
    """How what is kept is sealed, by the setting store_key_file. Raises: SettingsError as `read_key`."""
    return PLAIN if key_file is None else AesGcmCodec(read_key(key_file))


def _num_chunks(content_bytes: int) -> int:
    return max(1, -(-content_bytes // CHUNK_BYTES))


def _chunks(content: Iterable[Buffer], chunk_bytes: int) -> Iterator[memoryview]:
    """The same bytes in parts of so many, the last one shorter; one, if there are none. All are the same memory."""
    room = memoryview(bytearray(chunk_bytes))
    held = num_chunks = 0
    for part in content:
        rest = memoryview(part)
        while rest:
            taken = rest[: chunk_bytes - held]
            room[held : held + len(taken)] = taken
            held, rest = held + len(taken), rest[len(taken) :]
            if held == chunk_bytes:
                yield room
                held, num_chunks = 0, num_chunks + 1
    if held or not num_chunks:
        yield room[:held]
