# SPDX-License-Identifier: Apache-2.0
"""Which encoder outputs of a preempted request nobody computes, in vLLM's own encoder cache."""

import pytest
import torch
from vllm.multimodal.inputs import PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from tests.support.vllm_requests import Prompt, make_request, stock_hasher
from vllm_mmcache.base import engine_caches

START, NUM_TOKENS = 10, 8


@pytest.mark.parametrize("num_before", [0, 2])
def test_an_image_of_the_step_that_was_given_up(num_before: int) -> None:
    """Also where its range begins with text, and a step has ended behind that, as with Gemma 3."""
    prompt = Prompt(tuple(range(40)), (("one", START, NUM_TOKENS), ("two", START + NUM_TOKENS, NUM_TOKENS)))
    request = make_request(prompt, stock_hasher(4, sha256))
    is_embed = torch.arange(NUM_TOKENS) >= num_before
    for feature in request.mm_features:
        offset = feature.mm_position.offset
        feature.mm_position = PlaceholderRange(offset=offset, length=NUM_TOKENS, is_embed=is_embed)
    cache = EncoderCacheManager(cache_size=100)
    for index in range(2):
        cache.allocate(request, index)
    identifiers = [feature.identifier for feature in request.mm_features]
    for ends, num_computed in enumerate((START + num_before, START + NUM_TOKENS + num_before, START + 2 * NUM_TOKENS)):
        request.num_computed_tokens = num_computed
        assert engine_caches.uncomputed_outputs(cache, request) == {*identifiers[ends:]}
