# SPDX-License-Identifier: Apache-2.0
"""Identifiers: the page's test vectors, and that no two different lists of fields have one."""

import json
import re
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from vllm_mmcache.base import tenant
from vllm_mmcache.components.identity import identifiers

pytestmark = pytest.mark.answers

DOCS = Path(__file__).parents[4] / "docs"
PAGE = (DOCS / "identity.md").read_text()
VECTORS: list[dict[str, Any]] = json.loads((DOCS / "identity.json").read_text())


def by_the_page(kind: str, *fields: str) -> str:
    """Written from the page's text alone."""
    message = b"vllm-mmcache identity 1\0"
    for field in (kind, *fields):
        message += pack("<I", len(field.encode())) + field.encode()
    return blake3(message).hexdigest()


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_vectors(vector: dict[str, Any]) -> None:
    fields = vector["modality"], vector["id"], vector["arguments"], vector["salt"]
    makers: dict[str, Any] = {"content": identifiers.identifier, "name": identifiers.name_identifier}
    if vector["kind"] in makers:
        assert makers[vector["kind"]](*fields) == vector["identifier"]
    elif vector["kind"] == "unknown":
        assert identifiers.unknown_identifier(fields[0], fields[1], fields[3]) == vector["identifier"]
    else:
        assert identifiers.alias_key(fields[0], fields[1], fields[3]).hex() == vector["identifier"]
    if vector["identifier"] != vector["id"]:
        assert by_the_page(vector["kind"], *fields) == vector["identifier"]


def test_tenant_key_vector() -> None:
    (said,) = re.findall(r"The key of the salt `s` is\s+`([0-9a-f]{64})`", PAGE)
    key = tenant.key_of("s")
    assert key is not None
    assert key.hex() == said
    assert tenant.digest(b"bytes", key) == blake3(b"bytes", key=key).digest() != tenant.digest(b"bytes", None)
    assert tenant.key_of(None) is tenant.key_of("") is None


def test_stock_id_without_salt_and_arguments() -> None:
    assert identifiers.identifier("image", "ab" * 32) == "ab" * 32


Fields = st.tuples(st.text(max_size=6), st.text(max_size=6), st.text(max_size=6), st.text(min_size=1, max_size=6))


@given(Fields, Fields)
def test_fields_never_run_together(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert (identifiers.identifier(*one) == identifiers.identifier(*other)) == (one == other)


def test_kinds_never_meet() -> None:
    fields = "image", "x", "", "s"
    found = {
        identifiers.identifier(*fields),
        identifiers.name_identifier(*fields),
        identifiers.unknown_identifier("image", "x", "s"),
    }
    assert len({*found, identifiers.alias_key("image", "x", "s").hex()}) == 4


Json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(Json, Json)
def test_canonical_text_tells_values_apart(one: object, other: object) -> None:
    def typed(value: object) -> object:
        """Equality that sees types and the sign of zero."""
        if isinstance(value, dict):
            return {key: typed(inner) for key, inner in value.items()}
        return [typed(inner) for inner in value] if isinstance(value, list) else (type(value), repr(value))

    assert (identifiers.canonical(one) == identifiers.canonical(other)) == (typed(one) == typed(other))


def test_a_marker_is_the_beginning_and_no_more() -> None:
    """Whoever chooses the first digits can't have two contents or tenants share an identifier."""
    marker = "0123456789abcdef"
    plain = by_the_page("content", "image", "x", "", "")
    assert identifiers.identifier("image", "x", marker=marker) == marker + plain[:48]
    found = {
        identifiers.identifier("image", content, arguments, salt, marker)
        for content in ("x", "y")
        for arguments in ("", "[{},{}]")
        for salt in (None, "s")
    }
    assert len(found) == 8
    assert all(re.fullmatch(marker + "[0-9a-f]{48}", one) for one in found)
