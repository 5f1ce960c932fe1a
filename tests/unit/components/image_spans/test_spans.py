# SPDX-License-Identifier: Apache-2.0
"""Where a chunk may end: never inside a span, as far as the budget allows otherwise."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.multimodal.inputs import PlaceholderRange

from vllm_mmcache.components.image_spans import spans as hooks_engine_spans
from vllm_mmcache.components.image_spans.attention_spans import cut
from vllm_mmcache.components.image_spans.spans import Span, whole_spans

pytestmark = pytest.mark.answers


@st.composite
def layouts(draw: st.DrawFn) -> list[Span]:
    spans, position = [], 0
    for _ in range(draw(st.integers(0, 5))):
        position += draw(st.integers(0, 5))
        length = draw(st.integers(1, 8))
        spans.append((position, position + length - 1))
        position += length
    return spans


@pytest.mark.slow
@given(layouts(), st.integers(0, 60), st.integers(0, 60))
def test_never_ends_inside_and_is_as_long_as_it_can_be(spans: list[Span], start: int, asked: int) -> None:
    got = whole_spans(start, asked, spans)
    assert 0 <= got <= asked

    def splits(num: int) -> bool:
        return any(first < start + num <= last for first, last in spans)

    assert got == 0 or not splits(got)
    assert all(splits(num) for num in range(got + 1, asked + 1))


def test_cases() -> None:
    spans = [(10, 19), (20, 29)]
    assert whole_spans(0, 5, spans) == 5
    assert whole_spans(0, 15, spans) == 10  # inside: back to before
    assert whole_spans(0, 20, spans) == 20  # exactly the first
    assert whole_spans(10, 9, spans) == 0  # starts on it and does not fit (stock 0.32 splits it)
    assert whole_spans(15, 3, spans) == 0  # a prefix hit ended inside: the rest whole or not at all
    assert whole_spans(15, 7, spans) == 5
    assert whole_spans(0, 25, spans) == 20


@pytest.mark.parametrize("is_embed", [None, torch.zeros(0, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)])
def test_a_range_without_embeddings_constrains_nothing(is_embed: torch.Tensor | None) -> None:
    """A zero-length placeholder range, or one of text alone, between two images."""
    empty = PlaceholderRange(offset=14, length=0 if is_embed is None else len(is_embed), is_embed=is_embed)
    ranges = [PlaceholderRange(10, 4), empty, PlaceholderRange(20, 4)]
    features = [SimpleNamespace(modality="image", mm_position=r) for r in ranges]
    spans = hooks_engine_spans.image_spans(SimpleNamespace(mm_features=features))
    assert whole_spans(0, 14, spans) == 14
    assert whole_spans(0, 15, spans) == 15
    assert whole_spans(14, 8, spans) == 6
    assert hooks_engine_spans.last_embedding(features[1]) == 13
    assert cut(0, 0, 30, spans) == cut(0, 0, 30, [(10, 13), (20, 23)])
