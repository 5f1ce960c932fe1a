# SPDX-License-Identifier: Apache-2.0
"""Encryption at rest: encrypts what goes to a directory, Redis or Valkey, and decrypts what comes back.

    head    MAGIC, 8 bytes that tell keys apart
    chunk   12 bytes of nonce, ciphertext of up to CHUNK_BYTES, 16 bytes of tag     (one or more)

The cipher is AES-256-GCM, with a random nonce for each chunk. A chunk is bound to the name of the entry, to its place
in the entry and to the entry's length. So an entry that was changed, cut, moved, put together from others or encrypted
with another key is recognised. Names are keyed, too: without the key nobody can tell what a name stands for.
PLAIN leaves everything as it is. Any process, any thread; imports `cryptography` (the extra `encryption`) only where
there is a key.
"""

import os
from collections.abc import Iterable, Iterator
from struct import Struct

from blake3 import blake3

from vllm_mmcache.base.errors import StoreCorrupt, StoreKeyMismatch
from vllm_mmcache.base.key_file import read_key
from vllm_mmcache.storage.backend import Buffer, BytesEntry, Source

MAGIC = b"mmcseal1"
CHUNK_BYTES = 1024**2
"""Bytes that are decrypted at a time, and held in memory meanwhile."""
NONCE_BYTES, TAG_BYTES = 12, 16
HEAD_BYTES = len(MAGIC) + 8

_NO_KEY = "encrypted: MMCACHE_STORE_KEY_FILE names the key"
_PLACE = Struct("<QQ")
_ENCRYPTED_CHUNK_BYTES = CHUNK_BYTES + NONCE_BYTES + TAG_BYTES


class PlainCodec:
    """Without a key: content and names stay as they are."""

    def name(self, key: bytes) -> bytes:
        """The name of the entry with this key."""
        return key

    def num_bytes(self, content_bytes: int) -> int:
        """How many bytes an entry has whose content has `content_bytes`."""
        return content_bytes

    def encrypt(self, name: bytes, content: Iterable[Buffer], content_bytes: int) -> Iterator[Buffer]:
        """Encrypts the content of the entry `name`, in parts; each is valid until the next one comes."""
        yield from content

    def decrypt(self, name: bytes, source: Source) -> Source:
        """The content of the entry `name`.

        Reading it raises StoreKeyMismatch if it was encrypted with another key, and StoreCorrupt if it is damaged.
        """
        return _Plain(source)

    def encrypt_bytes(self, name: bytes, content: bytes) -> bytes:
        """The entry `name` with this content, as bytes."""
        entry = bytearray()
        for part in self.encrypt(name, [content], len(content)):
            entry += part
        return bytes(entry)

    def decrypt_bytes(self, name: bytes, entry: Buffer) -> bytes:
        """The content of the entry `name` with these bytes. Raises: as reading what `decrypt` returns."""
        if self.has_other_key(bytes(entry[: len(MAGIC)])):
            raise StoreKeyMismatch(_NO_KEY)
        return bytes(entry)

    def has_other_key(self, first: bytes) -> bool:
        """Whether an entry with these first bytes was encrypted with another key."""
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

    def encrypt(self, name: bytes, content: Iterable[Buffer], content_bytes: int) -> Iterator[Buffer]:
        """Encrypts the content: the head, then for each chunk a nonce, the AES-256-GCM text and the tag.

        A chunk is bound to `name`, its number and `content_bytes`. It is written over the memory of the one before it.
        """
        yield self._head
        # Used again and again: memory that is new takes longer to get than to encrypt.
        buffer = memoryview(bytearray(min(content_bytes, CHUNK_BYTES) + NONCE_BYTES + TAG_BYTES))
        for index, chunk in enumerate(_chunks(content, min(content_bytes, CHUNK_BYTES))):
            encrypted = buffer[: len(chunk) + NONCE_BYTES + TAG_BYTES]
            encrypted[:NONCE_BYTES] = nonce = os.urandom(NONCE_BYTES)
            place = name + _PLACE.pack(index, content_bytes)
            self._cipher.encrypt_into(nonce, chunk, place, encrypted[NONCE_BYTES:])
            yield encrypted

    def decrypt(self, name: bytes, source: Source) -> Source:
        """The content of an encrypted source. It is decrypted as it is read, which raises as in PlainCodec."""
        return _Decrypted(source, name, self)

    def decrypt_bytes(self, name: bytes, entry: Buffer) -> bytes:
        """The content of the entry `name` with these bytes. Raises: as in PlainCodec."""
        source = self.decrypt(name, BytesEntry(entry))
        content = bytearray(source.num_bytes)
        source.read_into(0, memoryview(content), 0.0)
        return bytes(content)

    def has_other_key(self, first: bytes) -> bool:
        """Whether it begins with MAGIC but not with this key's head. What is not encrypted has no other key."""
        return first.startswith(MAGIC) and first[:HEAD_BYTES] != self._head

    def check_head(self, first: bytes) -> None:
        """Check the first HEAD_BYTES of an entry.

        Raises: StoreKeyMismatch for the head of another key, StoreCorrupt for anything else that is not this key's.
        """
        if self.has_other_key(first):
            raise StoreKeyMismatch("encrypted with another key")
        if first != self._head:
            raise StoreCorrupt("not encrypted")

    def open_chunk(self, name: bytes, index: int, content_bytes: int, encrypted: memoryview, into: memoryview) -> None:
        """Decrypt a chunk into `into`. Raises: StoreCorrupt.

        encrypted: nonce, text and tag. into: as long, less NONCE_BYTES + TAG_BYTES. content_bytes: of all chunks
        together.
        """
        from cryptography.exceptions import InvalidTag

        nonce, rest = bytes(encrypted[:NONCE_BYTES]), encrypted[NONCE_BYTES:]
        try:
            self._cipher.decrypt_into(nonce, rest, name + _PLACE.pack(index, content_bytes), into)
        except InvalidTag:
            raise StoreCorrupt("what is encrypted was changed, or belongs under another name") from None


class _Plain:
    """A source that is read as it is; reading its beginning raises if it is encrypted."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.num_bytes = source.num_bytes

    def read_into(self, offset: int, buffer: memoryview, until: float) -> None:
        self._source.read_into(offset, buffer, until)
        if offset == 0 and PLAIN.has_other_key(bytes(buffer[: len(MAGIC)])):
            raise StoreKeyMismatch(_NO_KEY)


class _Decrypted:
    """The content of an encrypted source, from any offset; keeps the chunk that was read last."""

    def __init__(self, source: Source, name: bytes, key: AesGcmCodec) -> None:
        self._source, self._name, self._key = source, name, key
        chunks_bytes = source.num_bytes - HEAD_BYTES
        num_chunks = -(-chunks_bytes // _ENCRYPTED_CHUNK_BYTES)
        self.num_bytes = chunks_bytes - num_chunks * (NONCE_BYTES + TAG_BYTES)
        self._is_possible = self.num_bytes >= 0 and num_chunks == _num_chunks(self.num_bytes)
        if not self._is_possible:
            self.num_bytes = 0
        self._buffer = memoryview(bytearray(min(source.num_bytes, HEAD_BYTES + _ENCRYPTED_CHUNK_BYTES)))
        self._content = memoryview(bytearray(min(self.num_bytes, CHUNK_BYTES)))
        self._last = -1, self._content[:0]

    def read_into(self, offset: int, buffer: memoryview, until: float) -> None:
        if not self._is_possible or not (buffer or self.num_bytes):
            self._chunk(0, until)  # that there is nothing in it must be encrypted, too
        while buffer:
            index, start = divmod(offset, CHUNK_BYTES)
            piece = self._chunk(index, until)[start : start + len(buffer)]
            if not piece:
                raise StoreCorrupt(f"it ends at byte {offset}")
            buffer[: len(piece)] = piece
            buffer, offset = buffer[len(piece) :], offset + len(piece)

    def _chunk(self, index: int, until: float) -> memoryview:
        if self._last[0] != index:
            # The head comes with the first one.
            start = HEAD_BYTES + index * _ENCRYPTED_CHUNK_BYTES if index else 0
            end = min(HEAD_BYTES + (index + 1) * _ENCRYPTED_CHUNK_BYTES, self._source.num_bytes)
            encrypted = self._buffer[: max(0, end - start)]
            self._source.read_into(start, encrypted, until)
            if not index:
                self._key.check_head(bytes(encrypted[:HEAD_BYTES]))
                encrypted = encrypted[HEAD_BYTES:]
            if not self._is_possible or len(encrypted) < NONCE_BYTES + TAG_BYTES:
                raise StoreCorrupt(f"it ends at byte {self._source.num_bytes}")
            content = self._content[: len(encrypted) - NONCE_BYTES - TAG_BYTES]
            self._last = -1, content
            self._key.open_chunk(self._name, index, self.num_bytes, encrypted, content)
            self._last = index, content
        return self._last[1]


def of(key_file: str | None) -> PlainCodec:
    """The codec that the setting store_key_file asks for. Raises: SettingsError as `read_key`."""
    return PLAIN if key_file is None else AesGcmCodec(read_key(key_file))


def _num_chunks(content_bytes: int) -> int:
    return max(1, -(-content_bytes // CHUNK_BYTES))


def _chunks(content: Iterable[Buffer], chunk_bytes: int) -> Iterator[memoryview]:
    """The same bytes in parts of `chunk_bytes`, of which the last may be shorter; one empty part for no bytes.

    Each part is written over the memory of the one before it.
    """
    buffer = memoryview(bytearray(chunk_bytes))
    held = num_chunks = 0
    for part in content:
        rest = memoryview(part)
        while rest:
            taken = rest[: chunk_bytes - held]
            buffer[held : held + len(taken)] = taken
            held, rest = held + len(taken), rest[len(taken) :]
            if held == chunk_bytes:
                yield buffer
                held, num_chunks = 0, num_chunks + 1
    if held or not num_chunks:
        yield buffer[:held]
