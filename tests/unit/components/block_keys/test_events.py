# SPDX-License-Identifier: Apache-2.0
"""KV events keep the shapes that today's consumers parse: the plugin changes keys, never what an event says."""

import pytest
from vllm.utils.hashing import sha256

from tests.support.vllm_requests import Prompt, our_hasher, stock_hasher, stored

pytestmark = pytest.mark.answers

BLOCK = 4


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
    stock = stored(prompt, stock_hasher(BLOCK, sha256), BLOCK)
    ours = stored(prompt, our_hasher(BLOCK, sha256), BLOCK)
    assert ours.extra_keys == stock.extra_keys
    assert ours.token_ids == stock.token_ids
    assert ours.parent_block_hash is stock.parent_block_hash is None
    assert [type(key) for key in ours.block_hashes] == [type(key) for key in stock.block_hashes]
    assert len(ours.block_hashes) == len(stock.block_hashes)
    assert ours.block_hashes != stock.block_hashes  # the layout is ours
