# SPDX-License-Identifier: Apache-2.0
"""A package comes back bit for bit, or not at all."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from tests.features.packages import identity, package, same
from tests.sizes import scaled
from vllm_mmcache.errors import StoreCorrupt
from vllm_mmcache.features.identity import Identity
from vllm_mmcache.features.package import Package, pack, unpack
from vllm_mmcache.features.record import FORMAT

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int64]
HOSTILE = ["../../x", "/etc/passwd", "a\0b", "\ud800", "x" * 1_000_000, "", "ü\n\r"]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bits, NaNs with payloads too, in any shape, also empty and of no dimension."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=num_bytes, max_size=num_bytes)))
    return torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)


@settings(max_examples=scaled(150), deadline=None)
@given(st.dictionaries(st.text("abcdef_", min_size=1, max_size=8), tensors(), max_size=3), st.text(max_size=20))
def test_round_trip_is_bit_identical(named: dict[str, torch.Tensor], content_id: str) -> None:
    asked = Identity(content_id, "m", "p", "d", "0/1")
    kept = Package.of(named)
    stored, found = unpack(pack(asked, kept), asked)
    assert stored == asked
    assert same(found, kept)


def test_the_bytes_are_plain_safetensors() -> None:
    found = load(pack(identity(), package()))
    assert same(Package(found), package())


@pytest.mark.parametrize("content_id", HOSTILE)
def test_hostile_content_ids_come_back_and_stay_out_of_the_key(content_id: str) -> None:
    asked = replace(identity(), content_id=content_id)
    assert len(asked.key) == 64
    assert set(asked.key) <= set("0123456789abcdef")
    if len(content_id) < 1000:
        assert unpack(pack(asked, package()), asked)[0] == asked


def test_every_field_makes_the_key_and_fields_do_not_run_together() -> None:
    one = Identity("a", "b", "c", "d", "e")
    others = [replace(one, **{field.name: "x"}) for field in fields(one)]
    others += [Identity("ab", "", "c", "d", "e"), Identity("b", "a", "c", "d", "e")]
    assert len({one.key, *(other.key for other in others)}) == len(others) + 1


def test_the_key_is_a_fixed_function() -> None:
    # Replicas and restarts meet on it; changing it needs a new MAGIC.
    assert identity().key in (Path(__file__).parents[2] / "docs" / "features.md").read_text()
    assert identity().key == "f2ce484042d991970b0ef48da0dc3674f7a6062da6004939aacd09b173163228"


@pytest.mark.parametrize("field", [field.name for field in fields(Identity)])
def test_another_identity_is_refused(field: str) -> None:
    with pytest.raises(StoreCorrupt, match="another package"):
        unpack(pack(replace(identity(), **{field: "other"}), package()), identity())


def test_every_truncation_is_refused() -> None:
    packed = pack(identity(), package(num_tokens=4, hidden=8))
    for length in range(len(packed)):
        with pytest.raises(StoreCorrupt):
            unpack(packed[:length])


def test_every_flipped_bit_is_refused_or_harmless() -> None:
    packed = pack(identity(), package(num_tokens=4, hidden=8))
    refused = 0
    for position in range(len(packed) * 8):
        flipped = bytearray(packed)
        flipped[position // 8] ^= 1 << position % 8
        try:
            _, found = unpack(bytes(flipped), identity())
        except StoreCorrupt:
            refused += 1
        else:
            assert same(found, package(num_tokens=4, hidden=8))
    assert refused > len(packed) * 8 * 0.99


@settings(max_examples=scaled(300), deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused(garbage: bytes) -> None:
    with pytest.raises(StoreCorrupt):
        unpack(garbage)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"format": "vllm-mmcache features 0", "record": "{}", "blake3": ""},
        {"format": FORMAT},
        {"format": FORMAT, "record": "[" * 100_000, "blake3": ""},
        {"format": FORMAT, "record": json.dumps({"identity": {}, "tensors": {}}), "blake3": ""},
        {"format": FORMAT, "record": json.dumps({"identity": dict.fromkeys("abcde", 1), "tensors": 3}), "blake3": ""},
    ],
    ids=["foreign", "older version", "no record", "deep record", "no identity", "wrong types"],
)
def test_other_safetensors_are_refused(metadata: dict[str, str] | None) -> None:
    with pytest.raises(StoreCorrupt):
        unpack(save({"features": torch.zeros(2, 2)}, metadata))


def test_of_owns_its_memory() -> None:
    batch = torch.arange(1000.0).reshape(10, 100)
    view = Package.of({"features": batch[3:4], "turned": batch.T}).tensors
    assert view["features"].untyped_storage().nbytes() == 400
    assert all(tensor.is_contiguous() for tensor in view.values())
    assert torch.equal(view["turned"], batch.T)
