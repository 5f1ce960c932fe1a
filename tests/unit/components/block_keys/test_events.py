# SPDX-License-Identifier: Apache-2.0
"""KV events keep the shapes that today's consumers parse: the plugin changes keys, never what an event says."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool

from tests.support.vllm_requests import Prompt, make_request, our_hasher, stock_hasher

pytestmark = pytest.mark.answers

BLOCK = 4


def stored(hasher: Callable[[Any], list[bytes]], prompt: Prompt) -> Any:
    """The BlockStored event of a prompt's full blocks, from vLLM's real block pool."""
    request = make_request(prompt, hasher)
    pool = BlockPool(num_gpu_blocks=64, enable_caching=True, hash_block_size=BLOCK, enable_kv_cache_events=True)
    count = len(request.block_hashes)
    blocks = pool.get_new_blocks(count)
    pool.cache_full_blocks(
        request=request,
        blocks=blocks,
        num_cached_blocks=0,
        num_full_blocks=count,
        block_size=BLOCK,
        kv_cache_group_id=0,
    )
    (event,) = pool.take_events()
    return event


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt((1,) * 12),
        Prompt((1,) * 16, (("a", 2, 7), ("b", 10, 3)), salt="s"),
        Prompt((1,) * 16, (("a", 2, 7),), lora=("l", "/l")),
    ],
    ids=["text", "images and salt", "image and lora"],
)
def test_events_have_the_extra_keys_of_stock(prompt: Prompt) -> None:
    stock = stored(stock_hasher(BLOCK, sha256), prompt)
    ours = stored(our_hasher(BLOCK, sha256), prompt)
    assert ours.extra_keys == stock.extra_keys
    assert ours.token_ids == stock.token_ids
    assert ours.parent_block_hash is stock.parent_block_hash is None
    assert [type(key) for key in ours.block_hashes] == [type(key) for key in stock.block_hashes]
    assert len(ours.block_hashes) == len(stock.block_hashes)
    assert ours.block_hashes != stock.block_hashes  # the layout is ours
