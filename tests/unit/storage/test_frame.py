# SPDX-License-Identifier: Apache-2.0
"""Keys that no two lists of fields share, and frames that know their key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mmcache.storage.frame import frame, key, unframe

FIELDS = st.lists(st.one_of(st.text(max_size=5), st.binary(max_size=5)), max_size=4)


@pytest.mark.slow
@given(FIELDS, FIELDS)
def test_other_fields_have_another_key(one: list[str | bytes], other: list[str | bytes]) -> None:
    same = [(type(field), field) for field in one] == [(type(field), field) for field in other]
    assert (key("kind", *one) == key("kind", *other)) is same
    assert len(key("kind", *one)) == 32


def test_lengths_and_kinds_count() -> None:
    keys = {key("a", "bc"), key("ab", "c"), key("a", "b", "c"), key("abc"), key("a", b"bc"), key("a", "bc", "")}
    assert len(keys) == 6


@given(st.binary(max_size=40), st.binary(min_size=1, max_size=300), st.data())
def test_only_a_whole_frame_of_the_key_is_one(asked: bytes, value: bytes, data: st.DataObject) -> None:
    framed = frame(asked, value)
    assert unframe(asked, framed) == value
    assert unframe(asked + b"x", framed) is None
    assert unframe(asked[:-1], framed) is None or not asked
    place = data.draw(st.integers(0, len(framed) - 1))
    assert unframe(asked, framed[:place]) is None
    assert unframe(asked, framed + b"x") is None
    changed = bytearray(framed)
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    assert unframe(asked, bytes(changed)) is None


def test_key_and_value_are_apart() -> None:
    assert unframe(b"ab", frame(b"a", b"bc")) is None
    assert frame(b"a", b"bc")[37:] == frame(b"ab", b"bc")[37:]
    assert frame(b"a", b"bc")[5:37] != frame(b"ab", b"c")[5:37]
