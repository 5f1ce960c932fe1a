# SPDX-License-Identifier: Apache-2.0
"""For which hash functions the engine is handed our block hasher."""

from typing import Any

from vllm.utils.hashing import sha256_cbor

from tests.support.vllm_requests import Prompt, keys, our_hasher, stock_hasher


def test_a_function_that_only_has_the_name_of_vllms_keeps_the_layout_of_stock() -> None:
    """As where another plugin hashes blocks in its own way."""

    def own(value: Any) -> bytes:
        return sha256_cbor(value)

    own.__name__ = "sha256"
    prompt = Prompt((1,) * 16, (("a", 2, 3),), salt="s")
    assert keys(prompt, our_hasher(4, own)) == keys(prompt, stock_hasher(4, own))
