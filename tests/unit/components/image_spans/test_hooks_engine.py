# SPDX-License-Identifier: Apache-2.0
"""Which images the scheduler asks for again, beside what vLLM's own function says."""

from types import SimpleNamespace

import torch
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.utils import get_mm_features_in_window as stock_window

from vllm_mmcache.components.image_spans.hooks_engine import skip_computed_images
from vllm_mmcache.components.image_spans.spans import last_embedding


def test_an_image_is_left_out_of_a_window_only_when_its_last_embedding_is_computed(no_role: None) -> None:
    """Its range has text behind its embeddings; vLLM's own answer is the control."""
    is_embed = torch.tensor([False, True, True, True, False, False])
    features = [SimpleNamespace(mm_position=PlaceholderRange(offset=10, length=6, is_embed=is_embed))]
    last = last_embedding(features[0])
    assert last == 13
    found = {start: skip_computed_images(stock_window, None, (features, start, 20), {}) for start in range(9, 17)}
    assert [start for start, (lo, hi) in found.items() if lo < hi] == [9, 10, 11, 12, 13]
    assert stock_window(features, last + 1, 20) == (0, 1)
