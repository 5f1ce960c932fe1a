# SPDX-License-Identifier: Apache-2.0
"""What is remembered of requests that vLLM's own KV cache manager has served."""

from typing import Any

import torch
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from tests.support.vllm_requests import Prompt, make_request, our_hasher
from vllm_mmcache.components.observe.observer import REQUEST_STATE, Observer
from vllm_mmcache.components.observe.record.history import Entry

BLOCK = 4


def test_the_last_token_of_an_answer_has_no_kv(no_role: None) -> None:
    """Also where a step that was under way is counted already."""
    one = KVCacheGroupSpec(["layer"], FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32))
    config = KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=[one])
    observer = Observer(KVCacheManager(config, max_model_len=64, scheduler_block_size=BLOCK, hash_block_size=BLOCK))
    for prompt, answer, computed, expected in (
        ([1] * 5, [2, 3, 4], 8, 7),
        ([5] * 5, [2, 3, 4], 7, 7),
        ([6] * 5, [2, 3, 4], 6, 6),
        ([7] * 5, [], 5, 5),
    ):
        request: Any = make_request(Prompt(tuple(prompt)), our_hasher(BLOCK, sha256))
        observer.look(request, 0)
        request.append_output_token_ids(answer)
        request.num_computed_tokens = computed
        observer.finish(request, getattr(request, REQUEST_STATE))
        entry = observer.history.find(Entry("next", 0.0, "", "", len(prompt + answer)), prompt + answer, []).nearest
        assert entry is not None
        assert (entry.entry.num_computed, entry.entry.total) == (expected, expected)
