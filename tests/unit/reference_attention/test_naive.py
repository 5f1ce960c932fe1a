# SPDX-License-Identifier: Apache-2.0
"""The naive form is attention as its definition has it, and reads pages of both kinds of cache."""

from types import SimpleNamespace

import pytest
import torch

from vllm_mmcache.reference_attention.naive import allowed, allowed_at, attend, gather_pages
from vllm_mmcache.reference_attention.vllm_layers import CannotCompute, _pages

SPANS = [(2, 5), (6, 9)]


def test_rows_one_by_one() -> None:
    """Written out: softmax over what a row may see."""
    torch.manual_seed(0)
    query, key, value = torch.randn(4, 4, 8), torch.randn(2, 12, 8), torch.randn(2, 12, 8)
    mask = allowed(8, 12, SPANS, 5)
    found = attend(query, key, value, mask, 0.3, soft_cap=2.0)
    for row in range(4):
        for head in range(4):
            scores = torch.tensor([0.3 * float(query[row, head] @ key[head // 2, k]) for k in range(12)])
            seen = [k for k in range(12) if mask[row, k]]
            weights = torch.softmax(2.0 * torch.tanh(scores[seen] / 2.0), 0)
            assert torch.allclose(found[row, head], weights @ value[head // 2, seen], atol=1e-5)


@pytest.mark.parametrize("window", [0, 3])
def test_which_keys_a_row_sees(window: int) -> None:
    mask = allowed(0, 12, SPANS, window)
    for row in range(12):
        for key in range(12):
            same = any(first <= row <= last and first <= key <= last for first, last in SPANS)
            assert bool(mask[row, key]) == ((key <= row or same) and (not window or key > row - window))
    positions = torch.tensor([9, 0, 4])
    assert torch.equal(allowed_at(positions, 12, SPANS, window), mask[positions])


def test_keys_and_values_side_by_side() -> None:
    """As the backends of GPUs keep them."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 10, 8), torch.randn(2, 10, 8)
    table = torch.tensor([3, 1, 0], dtype=torch.int32)
    cache = torch.full((4, 2, 4, 16), float("nan"))
    for token in range(10):
        place = cache[table[token // 4], :, token % 4]
        place[:, :8], place[:, 8:] = keys[:, token], values[:, token]
    found_keys, found_values, *orders = _pages(SimpleNamespace(head_size=8), cache)
    assert orders == [None, None]
    assert torch.equal(gather_pages(found_keys, table, 10), keys)
    assert torch.equal(gather_pages(found_values, table, 10), values)


@pytest.mark.parametrize("shape", [(2, 4, 2, 4, 8), (4, 2, 4, 12)])
def test_a_cache_of_another_form_is_not_read(shape: tuple[int, ...]) -> None:
    with pytest.raises(CannotCompute, match="KV cache is"):
        _pages(SimpleNamespace(head_size=8), torch.zeros(shape))
    with pytest.raises(CannotCompute, match="uint8"):
        _pages(SimpleNamespace(head_size=8), torch.zeros((4, 2, 4, 16), dtype=torch.uint8))
