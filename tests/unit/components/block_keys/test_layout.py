# SPDX-License-Identifier: Apache-2.0
"""The layout of docs/block_keys.md: the vectors of docs/block_keys.json, recomputed by a second implementation."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from vllm.utils.hashing import sha256, sha256_cbor, xxhash_cbor

from tests.support.vllm_requests import Prompt, keys, our_hasher, stock_hasher
from vllm_mmcache.components.block_keys import layout
from vllm_mmcache.components.block_keys.layouts import layout_report

pytestmark = pytest.mark.answers

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parents[4] / "docs" / "block_keys.json").read_text())


def by_the_book(case: dict[str, Any]) -> list[str]:
    """The page's text turned into code, sharing nothing with the package: what a router would write."""

    def h(message: bytes) -> bytes:
        return hashlib.sha256(message).digest()

    def string(text: str) -> bytes:
        return struct.pack("<I", len(text.encode())) + text.encode()

    size = case["block_size"]
    none_hash = bytes.fromhex(case["none_hash"])
    parent = h(b"vllm-mmcache block key 1\0" + struct.pack("<I", size) + none_hash)
    out = []
    for start in range(0, len(case["tokens"]) // size * size, size):
        message = parent + struct.pack(f"<{size}i", *case["tokens"][start : start + size])
        state = bytes(32)
        entered = False
        for name, offset, length in case["images"]:
            if offset < start + size and not (length == 0 and offset % size == 0):
                state = h(state + struct.pack("<QQ", offset, length) + string(name))
                entered = True
        if entered:
            message += b"\x01" + state
        if case["lora"]:
            message += b"\x02" + string(case["lora"][0]) + string(case["lora"][1])
        if start == 0 and case["salt"]:
            message += b"\x03" + string(case["salt"])
        parent = h(message)
        out.append(parent.hex())
    return out


def test_there_are_vectors() -> None:
    assert len(VECTORS) >= 5


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: str(case["name"]))
def test_vector(case: dict[str, Any]) -> None:
    prompt = Prompt(
        tuple(case["tokens"]),
        tuple(tuple(image) for image in case["images"]),
        salt=case["salt"],
        lora=tuple(case["lora"]) if case["lora"] else None,
    )
    ours = [key.hex() for key in keys(prompt, our_hasher(case["block_size"], sha256))]
    assert ours == case["keys"]
    assert by_the_book(case) == case["keys"]


@pytest.mark.parametrize("function", [sha256_cbor, xxhash_cbor])
def test_cbor_algorithms_keep_the_layout_of_stock(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    prompt = Prompt((1,) * 16, (("a", 2, 3),), salt="s")
    assert keys(prompt, our_hasher(4, function)) == keys(prompt, stock_hasher(4, function))


@pytest.mark.parametrize(
    ("algo", "options", "expected"),
    [
        ("sha256", {}, "cumulative"),
        ("xxhash", {}, "cumulative"),
        ("sha256_cbor", {}, "stock"),
        ("xxhash_cbor", {}, "stock"),
        ("unknown", {}, "stock"),
        ("sha256", {"enabled": False}, "stock"),
        ("sha256", {"num_lookahead_tokens": 1}, "stock"),
    ],
)
def test_layout_report(algo: str, options: dict[str, Any], expected: str) -> None:
    name, why = layout_report(algo, **options)
    assert name == expected
    assert why


def test_token_that_does_not_fit_is_an_error_not_another_token() -> None:
    with pytest.raises(OverflowError):
        layout.token_bytes([2**31])
