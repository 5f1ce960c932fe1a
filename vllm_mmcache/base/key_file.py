# SPDX-License-Identifier: Apache-2.0
"""What a key may be, and keys in files that a setting names. Any process, at start."""

import base64
import binascii
import importlib.util

from vllm_mmcache.base import distributions
from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.base.secret_files import read_secret, shown

KEY_BYTES = 32
KEY_CHARS = 16  # the least that a key may have


def check_key(key: str) -> None:
    """Raises: ValueError for a key that is too short to be one, or that can't travel in a header."""
    if len(key) < KEY_CHARS or not all("!" <= char <= "~" for char in key):
        raise ValueError(f"a key has {KEY_CHARS} printable ASCII characters or more, and no space")


def read_key(key_file: str) -> bytes:
    """The key that the setting store_key_file names.

    Raises: SettingsError as `read_32_bytes`, and where `cryptography` is not installed.
    """
    if importlib.util.find_spec("cryptography") is None:
        where = f"store_key_file {shown(key_file)}"
        raise SettingsError(f"{where} needs the package cryptography: {distributions.install_command('encryption')}")
    return read_32_bytes(key_file, "store_key_file")


def read_32_bytes(key_file: str, setting: str) -> bytes:
    """The key in a file that a setting names: 32 bytes as they are, as 64 hex digits, or in base64.

    Raises: SettingsError where it is not there, is no such key or others may read it. Nothing of the key is in the
    message.
    """
    make = "make one with openssl rand -hex 32"
    content = read_secret(setting, key_file, make)
    for key in (content, _decoded(content.strip())):
        if len(key) == KEY_BYTES:
            return key
    raise SettingsError(
        f"{setting} {shown(key_file)} holds {len(content)} bytes, expected {KEY_BYTES}, or 64 hex digits, or "
        f"{KEY_BYTES} bytes in base64: {make}"
    )


def _decoded(text: bytes) -> bytes:
    try:
        return (
            bytes.fromhex(text.decode("ascii")) if len(text) == 2 * KEY_BYTES else base64.b64decode(text, validate=True)
        )
    except (ValueError, binascii.Error):
        return b""
