# SPDX-License-Identifier: Apache-2.0
"""Encryption at rest: what is encrypted comes back only whole, under its name and key, and key files are looked at."""

import base64
import importlib.util
import os
import random
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.packages import LARGE as LARGE_PACKAGE
from tests.support.packages import features, file_tier, identity, load, packed, save
from vllm_mmcache.base import key_file as encryption_key_file
from vllm_mmcache.base.errors import SettingsError, StoreCorrupt, StoreKeyMismatch
from vllm_mmcache.base.settings import load_settings
from vllm_mmcache.components.features.tiers import key_of
from vllm_mmcache.storage.backend import BytesEntry
from vllm_mmcache.storage.encryption import CHUNK_BYTES, HEAD_BYTES, NONCE_BYTES, PLAIN, TAG_BYTES, AesGcmCodec
from vllm_mmcache.storage.files import FileBackend

KEY = AesGcmCodec(bytes(range(32)))
OTHER = AesGcmCodec(bytes(range(1, 33)))
NAME = b"n" * 32
SIZES = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 7]
CHUNK = CHUNK_BYTES + NONCE_BYTES + TAG_BYTES


def content(num_bytes: int) -> bytes:
    return random.Random(num_bytes).randbytes(num_bytes)


@pytest.mark.parametrize("num_bytes", SIZES)
def test_there_and_back(num_bytes: int) -> None:
    whole = content(num_bytes)
    cuts = sorted([0, num_bytes // 3, num_bytes // 2, num_bytes])
    parts = [memoryview(whole)[start:end] for start, end in pairwise(cuts)]
    entry = b"".join(map(bytes, KEY.encrypt(NAME, parts, num_bytes)))
    assert len(entry) == KEY.num_bytes(num_bytes)
    assert KEY.decrypt_bytes(NAME, entry) == whole
    assert num_bytes < 16 or whole[:16] not in entry
    assert KEY.encrypt_bytes(NAME, whole) != entry  # nonces are random
    source = KEY.decrypt(NAME, BytesEntry(entry))
    assert source.num_bytes == num_bytes
    for start, end in [(0, min(7, num_bytes)), (num_bytes // 2, num_bytes), (num_bytes // 3, num_bytes // 2)]:
        piece = bytearray(end - start)
        source.read_into(start, memoryview(piece), 0.0)
        assert piece == whole[start:end]


@pytest.mark.parametrize("num_bytes", SIZES)
def test_without_a_key_all_is_as_it_is(num_bytes: int) -> None:
    whole = content(num_bytes)
    assert PLAIN.encrypt_bytes(NAME, whole) == PLAIN.decrypt_bytes(NAME, whole) == whole
    assert (PLAIN.name(NAME), PLAIN.num_bytes(num_bytes)) == (NAME, num_bytes)


def test_names_are_keyed() -> None:
    assert len({NAME, KEY.name(NAME), OTHER.name(NAME), KEY.name(b"m" * 32)}) == 4
    assert len(KEY.name(NAME)) == 32


def swapped(entry: bytes) -> bytes:
    """The first two chunks in the other order."""
    first, second = HEAD_BYTES, HEAD_BYTES + CHUNK
    return entry[:first] + entry[second : second + CHUNK] + entry[first:second] + entry[second + CHUNK :]


LARGE = 3 * CHUNK_BYTES + 7
CHANGES = {
    "cut": lambda entry: entry[:-1],
    "cut at a chunk": lambda entry: entry[: HEAD_BYTES + 2 * CHUNK],
    "the last chunk is gone": lambda entry: entry[: HEAD_BYTES + 3 * CHUNK],
    "the first chunk is gone": lambda entry: entry[:HEAD_BYTES] + entry[HEAD_BYTES + CHUNK :],
    "longer": lambda entry: entry + b"x",
    "a chunk more": lambda entry: entry + entry[-CHUNK:],
    "swapped": swapped,
    "of another text": lambda entry: (
        KEY.encrypt_bytes(NAME, content(LARGE))[: HEAD_BYTES + CHUNK]
        + KEY.encrypt_bytes(NAME, content(LARGE + 1))[HEAD_BYTES + CHUNK :]
    ),
    "head alone": lambda entry: entry[:HEAD_BYTES],
    "less than a head": lambda entry: entry[:5],
    "empty": lambda entry: b"",
    "in the clear": lambda entry: content(LARGE),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_does_not_open(change: str) -> None:
    with pytest.raises(StoreCorrupt):
        KEY.decrypt_bytes(NAME, CHANGES[change](KEY.encrypt_bytes(NAME, content(LARGE))))


def test_no_bit_may_change() -> None:
    entry = KEY.encrypt_bytes(NAME, content(50))
    for bit in range(8 * len(entry)):
        changed = bytearray(entry)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StoreCorrupt):
            KEY.decrypt_bytes(NAME, bytes(changed))


@pytest.mark.parametrize("num_bytes", [0, 50])
def test_the_name_and_the_key_count(num_bytes: int) -> None:
    entry = KEY.encrypt_bytes(NAME, content(num_bytes))
    with pytest.raises(StoreCorrupt, match="another name"):
        KEY.decrypt_bytes(b"m" * 32, entry)
    with pytest.raises(StoreKeyMismatch, match="another key"):
        OTHER.decrypt_bytes(NAME, entry)
    assert OTHER.has_other_key(entry[:HEAD_BYTES])
    assert PLAIN.has_other_key(entry[:HEAD_BYTES])
    assert not KEY.has_other_key(entry[:HEAD_BYTES])
    assert not KEY.has_other_key(content(50))


MIDDLE = HEAD_BYTES + 2 * CHUNK + 100
PLANTED = {
    "in the clear": lambda entry, other: packed(0, LARGE_PACKAGE),
    "of another name": lambda entry, other: other,
    "encrypted with another key": lambda entry, other: OTHER.encrypt_bytes(
        KEY.name(key_of(identity(0))), packed(0, LARGE_PACKAGE)
    ),
    "a bit flipped": lambda entry, other: entry[:MIDDLE] + bytes([entry[MIDDLE] ^ 1]) + entry[MIDDLE + 1 :],
    "a chunk of another": lambda entry, other: entry[: HEAD_BYTES + CHUNK] + other[HEAD_BYTES + CHUNK :],
    "truncated": lambda entry, other: entry[:MIDDLE],
    "longer": lambda entry, other: entry + b"x",
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTED)
def test_a_large_package_that_was_changed_where_it_lies(tmp_path: Path, plant: str) -> None:
    """Of twelve chunks, which are decrypted as they are read: none of it is served, and nothing of it can be seen."""
    tier = file_tier(tmp_path, codec=KEY)
    for number in (0, 1):
        assert save(tier, number, LARGE_PACKAGE)
    assert isinstance(tier.backend, FileBackend)
    path, other = (tier.backend.path_of(KEY.name(key_of(identity(number)))) for number in (0, 1))
    entry, whole = path.read_bytes(), packed(0, LARGE_PACKAGE)
    assert len(entry) == KEY.num_bytes(len(whole))
    assert not [at for at in range(0, len(whole) - 32, len(whole) // 100) if whole[at : at + 32] in entry]
    assert load(tier, 0, LARGE_PACKAGE) == features(0, LARGE_PACKAGE)
    path.write_bytes(PLANTED[plant](entry, other.read_bytes()))
    assert load(tier, 0, LARGE_PACKAGE) is None
    counts = tier.counts.snapshot()
    assert (counts["hits"], counts["misses"], counts["set_aside"], counts["errors"]) == (1, 1, 1, 0)
    assert load(tier, 1, LARGE_PACKAGE) == features(1, LARGE_PACKAGE)
    assert save(tier, 0, LARGE_PACKAGE)  # the tower ran again
    assert load(tier, 0, LARGE_PACKAGE) == features(0, LARGE_PACKAGE)


def key_file(folder: Path, content: bytes, mode: int = 0o600) -> str:
    path = folder / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


SECRET = bytes(range(32))


@pytest.mark.parametrize(
    "written",
    [
        SECRET,
        b"\n" * 32,  # bytes as they are, whatever they are
        SECRET.hex().encode(),
        SECRET.hex().upper().encode() + b"\r\n",
        base64.b64encode(SECRET),
        base64.b64encode(SECRET) + b"\n",
    ],
)
def test_forms_of_a_key(tmp_path: Path, written: bytes) -> None:
    expected = written if len(written) == 32 else SECRET
    assert encryption_key_file.read_key(key_file(tmp_path, written)) == expected
    assert encryption_key_file.read_key(key_file(tmp_path, written, 0o440)) == expected  # as a secret of a group


@pytest.mark.parametrize(
    ("written", "mode", "said"),
    [
        (b"", 0o600, "holds 0 bytes, expected 32"),
        (SECRET[:-1], 0o600, "holds 31 bytes"),
        (SECRET + b"\n", 0o600, "holds 33 bytes"),
        (b"secretsecret" * 6, 0o600, "expected 32, or 64 hex digits"),
        (b"g" * 64, 0o600, "openssl rand -hex 32"),
        (SECRET * 100, 0o600, "more than 1024 bytes"),
        (SECRET, 0o644, "others may read or change it: chmod 600"),
        (SECRET, 0o602, "others may read or change it"),
        (SECRET, 0o620, "others may read or change it"),
    ],
)
def test_what_is_no_key_stops_the_start(tmp_path: Path, written: bytes, mode: int, said: str) -> None:
    place = key_file(tmp_path, written, mode)
    with pytest.raises(SettingsError) as error:
        load_settings({"store_key_file": place})
    assert said in str(error.value)
    assert place in str(error.value)
    assert "secret" not in str(error.value)


def test_a_key_that_is_not_there_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (tmp_path / "none", tmp_path):
        monkeypatch.setenv("MMCACHE_STORE_KEY_FILE", str(place))
        with pytest.raises(SettingsError, match=r"can't be read: No such file|is no file"):
            load_settings()
    monkeypatch.setenv("MMCACHE_STORE_KEY_FILE", key_file(tmp_path, os.urandom(32)))
    assert load_settings().store_key_file


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"cryptography: pip install .*\[encryption\]"):
        load_settings({"store_key_file": key_file(tmp_path, SECRET)})
