# SPDX-License-Identifier: Apache-2.0
"""A package comes back bit for bit, or not at all."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from tests.support.packages import SHAPE, features, identity, packed
from tests.support.sizes import scaled
from vllm_mmcache.base.errors import StoreCorrupt
from vllm_mmcache.components.features.identity import Identity
from vllm_mmcache.components.features.package import DTYPES, FORMAT, LENGTH, Check, Record, Shape, head, pack, unpack

HOSTILE = ["../../x", "/etc/passwd", "a\0b", "\ud800", "x" * 1_000_000, "", "ü\n\r"]
SMALL = Shape(4, 8, "bfloat16")


@st.composite
def shaped(draw: st.DrawFn) -> tuple[Shape, bytes]:
    """Any bits, NaNs with payloads too, in any shape, also empty."""
    shape = Shape(draw(st.integers(0, 4)), draw(st.integers(0, 4)), draw(st.sampled_from(sorted(DTYPES))))
    return shape, draw(st.binary(min_size=shape.num_bytes, max_size=shape.num_bytes))


@pytest.mark.slow
@settings(max_examples=scaled(150), deadline=None)
@given(shaped(), st.text(max_size=20))
def test_round_trip_is_bit_identical(given_: tuple[Shape, bytes], content_id: str) -> None:
    shape, data = given_
    asked = Identity(content_id, "m", "p", "d", "0/1")
    assert unpack(pack(asked, shape, data)) == (asked, shape, data)


@settings(max_examples=scaled(100), deadline=None)
@given(shaped(), st.text(max_size=20))
def test_the_bytes_are_plain_safetensors(
    tmp_path_factory: pytest.TempPathFactory, given_: tuple[Shape, bytes], content_id: str
) -> None:
    shape, data = given_
    path = tmp_path_factory.getbasetemp() / "plain.safetensors"
    path.write_bytes(pack(Identity(content_id, "m", "p", "d", "0/1"), shape, data))
    (found,) = load_file(path).items()
    assert found[0] == "features"
    assert (found[1].dtype, tuple(found[1].shape)) == (getattr(torch, shape.dtype), (shape.num_tokens, shape.width))
    assert found[1].nbytes == shape.num_bytes
    if shape.num_bytes:
        assert found[1].reshape(-1).view(torch.uint8).numpy().tobytes() == data


def test_features_begin_where_any_dtype_may() -> None:
    """A reader may map the file: its features lie at a multiple of 8 bytes, whatever the identity's length is."""
    assert {len(head(identity("x" * n), SMALL, features(0, SMALL))) % 8 for n in range(20)} == {0}


@pytest.mark.parametrize("content_id", HOSTILE)
def test_hostile_content_ids_come_back_and_stay_out_of_the_key(content_id: str) -> None:
    asked = replace(identity(), identifier=content_id)
    assert len(asked.key) == 64
    assert set(asked.key) <= set("0123456789abcdef")
    if len(content_id) < 1000:
        assert unpack(pack(asked, SHAPE, features()))[0] == asked


def test_every_field_makes_the_key_and_fields_do_not_run_together() -> None:
    one = Identity("a", "b", "c", "d", "e")
    others = [replace(one, **{field.name: "x"}) for field in fields(one)]
    others += [Identity("ab", "", "c", "d", "e"), Identity("b", "a", "c", "d", "e")]
    assert len({one.key, *(other.key for other in others)}) == len(others) + 1


def test_the_key_is_a_fixed_function() -> None:
    # Replicas and restarts meet on it; changing it needs a new MAGIC.
    assert identity().key in (Path(__file__).parents[4] / "docs" / "features.md").read_text()
    assert identity().key == "f2ce484042d991970b0ef48da0dc3674f7a6062da6004939aacd09b173163228"


@pytest.mark.parametrize("field", [field.name for field in fields(Identity)])
def test_another_identity_is_refused(field: str) -> None:
    stored = pack(replace(identity(), **{field: "other"}), SHAPE, features())
    with pytest.raises(StoreCorrupt, match="another package"):
        Check(identity(), SHAPE).begin(stored, len(stored))


@pytest.mark.parametrize("other", [replace(SHAPE, num_tokens=15), replace(SHAPE, width=32), Shape(16, 64, "float16")])
def test_another_shape_is_refused(other: Shape) -> None:
    """Whole packages under the right name whose features are not what this model makes of the image."""
    stored = pack(identity(), other, features(0, other))
    assert unpack(stored)[1] == other
    with pytest.raises(StoreCorrupt, match="this model's are"):
        Check(identity(), SHAPE).begin(stored, len(stored))


def test_a_check_in_pieces() -> None:
    stored = packed()
    for size in (1, 7, 100, len(stored)):
        check = Check(identity(), SHAPE)
        check.begin(stored[: check.num_head_bytes], len(stored))
        for start in range(check.num_head_bytes, len(stored), size):
            check.add(stored[start : start + size])
        check.end()
    check = Check(identity(), SHAPE)
    check.begin(stored, len(stored))
    check.add(stored[check.num_head_bytes : -1])
    with pytest.raises(StoreCorrupt, match="checksum"):
        check.end()


def test_every_truncation_is_refused() -> None:
    stored = packed(0, SMALL)
    for length in range(len(stored)):
        with pytest.raises(StoreCorrupt):
            unpack(stored[:length])
    with pytest.raises(StoreCorrupt):
        unpack(stored + b"\0")


@pytest.mark.slow
def test_every_flipped_bit_is_refused() -> None:
    stored = packed(0, SMALL)
    for position in range(len(stored) * 8):
        flipped = bytearray(stored)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(StoreCorrupt):
            unpack(flipped)
    unpack(stored)


@pytest.mark.slow
@settings(max_examples=scaled(300), deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused(garbage: bytes) -> None:
    with pytest.raises(StoreCorrupt):
        unpack(garbage)


RECORD: dict[str, Any] = json.loads(Record(identity(), SMALL, "").text)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"format": "vllm-mmcache features 1", "record": "{}", "blake3": ""},
        {"format": FORMAT},
        {"format": FORMAT, "record": "[" * 100_000, "blake3": ""},
        {"format": FORMAT, "record": json.dumps(RECORD | {"identity": {}}), "blake3": ""},
        {"format": FORMAT, "record": json.dumps(RECORD | {"identity": dict.fromkeys("abcde", 1)}), "blake3": ""},
        {"format": FORMAT, "record": json.dumps(RECORD | {"shape": 3}), "blake3": ""},
        {"format": FORMAT, "record": json.dumps(RECORD | {"shape": [True, 2]}), "blake3": ""},
        {"format": FORMAT, "record": json.dumps(RECORD | {"shape": [-1, 2]}), "blake3": ""},
        {"format": FORMAT, "record": json.dumps(RECORD | {"shape": [10**400, 2]}), "blake3": ""},
        {"format": FORMAT, "record": json.dumps(RECORD | {"dtype": "float99"}), "blake3": ""},
        {"format": FORMAT, "record": json.dumps(RECORD, separators=(",", ":")), "blake3": ""},
    ],
    ids=[
        "foreign", "older version", "no record", "deep record", "no identity", "wrong types", "no shape", "truth",
        "negative", "astronomic", "dtype", "checksum",
    ],
)  # fmt: skip
def test_other_safetensors_are_refused(metadata: dict[str, str] | None) -> None:
    with pytest.raises(StoreCorrupt):
        unpack(save({"features": torch.zeros(4, 8, dtype=torch.bfloat16)}, metadata))


def test_a_long_header_is_not_parsed() -> None:
    header = json.dumps({"__metadata__": {"format": FORMAT, "x": "x" * 2**20}}).encode()
    with pytest.raises(StoreCorrupt, match="a header of"):
        unpack(LENGTH.pack(len(header)) + header)


def test_features_of_another_size_are_not_packed() -> None:
    with pytest.raises(ValueError, match="2046 bytes of features, expected 2048"):
        pack(identity(), SHAPE, features()[:-2])
    with pytest.raises(ValueError, match="dtype 'int3'"):
        Shape(1, 1, "int3")
