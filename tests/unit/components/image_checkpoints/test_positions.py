# SPDX-License-Identifier: Apache-2.0
"""Which boundaries are chosen: the likely ones first, few, apart, and none that cost without need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mmcache.components.image_checkpoints.positions import END, KINDS, START, candidates, choose

pytestmark = pytest.mark.answers

BLOCK = 32


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[int, int]]:
    ranges, position = [], 0
    for _ in range(draw(st.integers(0, 8))):
        position += draw(st.integers(0, 200))
        length = draw(st.integers(1, 300))
        ranges.append((position, length))
        position += length
    return ranges


@pytest.mark.slow
@given(
    layouts(), st.integers(0, 60), st.integers(0, 10), st.integers(1, 300), st.sets(st.integers(0, 60)),
    st.sampled_from([0, BLOCK // 2, BLOCK]),
)  # fmt: skip
def test_bounds_hold(
    ranges: list[tuple[int, int]], hit: int, most: int, apart: int, by_vllm: set[int], proof: int
) -> None:
    kept = {block * BLOCK for block in by_vllm}
    found = candidates(ranges, hit * BLOCK, BLOCK, proof)
    chosen = [c.tokens for c in choose(found, kept, KINDS, most, apart)]
    edges = {(edge - proof) // BLOCK * BLOCK for offset, length in ranges for edge in (offset, offset + length)}
    assert len(chosen) <= most
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= edges - kept
    assert all(tokens > hit * BLOCK for tokens in chosen)
    assert all(later - earlier >= apart for earlier, later in zip([0, *chosen], chosen, strict=False))
    if found and most and found[0].tokens >= apart and found[0].tokens not in kept:
        assert found[0].tokens in chosen, "the likeliest always has its place"


def test_order() -> None:
    ranges = [(100, 100), (300, 100), (500, 100), (700, 100)]
    assert [c.tokens for c in candidates(ranges, 0, 10)] == [800, 100, 700, 600, 400, 200, 500, 300]
    # Two images are covered: the third is the first that varies.
    assert [c.tokens for c in candidates(ranges, 400, 10)][:3] == [800, 500, 700]
    chosen = choose(candidates(ranges, 0, 10), {100}, KINDS, 3, 64)
    assert [c.tokens for c in chosen] == [600, 700, 800]


def test_what_is_behind_a_hit_must_be_equal_too() -> None:
    """A draft head's block: it may not reach beyond the boundary."""
    assert [c.tokens for c in candidates([(105, 100)], 0, 10)] == [200, 100]
    assert [c.tokens for c in candidates([(105, 100)], 0, 10, 10)] == [190, 90]
    assert candidates([(0, 5)], 0, 10, 10) == []


def test_kinds_that_do_not_pay_are_left_out() -> None:
    found = candidates([(100, 60), (160, 40)], 0, 20)
    assert {c.tokens: set(c.kinds) for c in found} == {200: {END}, 100: {START}, 160: {START, END}}
    assert [c.tokens for c in choose(found, (), {START}, 9, 1)] == [100, 160]
    assert choose(found, (), (), 9, 1) == ()
