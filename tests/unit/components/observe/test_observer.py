# SPDX-License-Identifier: Apache-2.0
"""What is remembered of requests that vLLM's own KV cache manager has served."""

from typing import Any

import torch
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from tests.support.vllm_requests import Prompt, make_request, our_hasher
from vllm_mmcache.components.observe.observer import REQUEST_STATE, Observer, _cut
from vllm_mmcache.components.observe.record.history import Entry
from vllm_mmcache.components.observe.record.schema import Reason
from vllm_mmcache.components.observe.record.wire import Cause

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


def test_causes_are_cut_to_what_vllm_reused_and_lie_where_they_lay() -> None:
    """A cause may lie before its tokens, at a difference that what is new separates from them."""
    differs, new, again = (Cause(reason, start, 10, 20, {}) for reason, start in
        ((Reason.IMAGE_DIFFERS, 20), (Reason.NEW_CONTENT, 30), (Reason.IMAGE_DIFFERS, 40)))  # fmt: skip
    causes = [differs, new._replace(at=30), again]
    assert _cut(causes, 20, 50) == causes
    less = _cut(causes, 16, 50)
    assert [(c.reason, c.start, c.tokens, c.at) for c in less] == [
        (Reason.UNEXPLAINED, 16, 4, 16), *((c.reason, c.start, c.tokens, c.at) for c in causes),
    ]  # fmt: skip
    more = _cut(causes, 24, 50)
    assert [(c.start, c.tokens, c.at) for c in more] == [(24, 6, 24), (30, 10, 30), (40, 10, 24)]
