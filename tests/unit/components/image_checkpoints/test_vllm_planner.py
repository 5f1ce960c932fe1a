# SPDX-License-Identifier: Apache-2.0
"""What is planned and counted on vLLM's own KV cache manager, without an engine: groups in any order, a draft head."""

import inspect
from typing import Any

import pytest
import torch
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from tests.support.vllm_requests import Prompt, make_request, our_hasher, stock_hasher
from vllm_mmcache.components.image_checkpoints.vllm_planner import PLAN, Checkpoints
from vllm_mmcache.metrics import counters, transport

pytestmark = pytest.mark.answers

BLOCK = 16
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
SPARSE = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=2 * BLOCK)
IMAGE_START, IMAGE_END = 20, 132
IMAGE = ("image", IMAGE_START, IMAGE_END - IMAGE_START)


def about_the_image(word: int, length: int = 60) -> Prompt:
    """A question about the same image; two of them differ from the image's end on."""
    tokens = (1,) * IMAGE_START + (7,) * (IMAGE_END - IMAGE_START) + (word,) * length
    return Prompt(tokens, (IMAGE,))


class Scheduler:
    """As much of vLLM's as is looked at."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.kv_cache_manager = manager


class Cache:
    """vLLM's KV cache manager for these groups of layers, and the planner of checkpoints on it."""

    def __init__(
        self, *groups: FullAttentionSpec | SlidingWindowSpec, draft_head: bool = False, key_lookahead: int = 0
    ) -> None:
        config = KVCacheConfig(
            num_blocks=400,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(groups)],
            prefix_cache_retention_interval=0,  # of sparse groups vLLM keeps the prompt's end alone
        )
        looks_ahead = {"num_hash_lookahead_tokens": key_lookahead} if key_lookahead else {}
        self.manager = KVCacheManager(
            config,
            max_model_len=1024,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
            use_eagle=draft_head,
            **looks_ahead,
        )
        self.hasher = stock_hasher(BLOCK, sha256, **looks_ahead) if key_lookahead else our_hasher(BLOCK, sha256)
        self.scheduler = Scheduler(self.manager)
        self.checkpoints = Checkpoints(self.scheduler)

    def hit(self, prompt: Prompt) -> int:
        """How many tokens of a prompt are cached."""
        return int(self.manager.get_computed_blocks(make_request(prompt, self.hasher))[1])

    def compute(self, prompt: Prompt) -> list[int]:
        """Compute a prompt to its end. The checkpoints that were planned for it, in tokens."""
        request: Any = make_request(prompt, self.hasher)
        blocks, hit, junction = self.manager.get_computed_blocks(request)
        self.checkpoints.plan(request, hit, junction)
        assert self.manager.allocate_slots(request, request.num_tokens - hit, hit, blocks)
        self.manager.free(request)
        return [checkpoint.tokens for checkpoint in getattr(request, PLAN).checkpoints]

    def evict(self, group: int, prompt: Prompt, tokens: int) -> None:
        """Evict the block of one group that ends there."""
        pool = self.manager.block_pool
        found = pool.get_cached_block(make_request(prompt, self.hasher).block_hashes[tokens // BLOCK - 1], [group])
        assert found
        pool.evict_blocks({block.block_id for block in found})


@pytest.fixture(autouse=True)
def counted(no_role: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default settings, and counters at 0 that are this test's alone."""
    for counter in (counters.CHECKPOINTS_MADE, counters.CHECKPOINTS_USED, counters.CHECKPOINTS_EVICTED_UNUSED):
        monkeypatch.setattr(counter, "value", 0)
    monkeypatch.setattr(transport, "_counted", {})


ORDERS = {
    "sparse first": (SPARSE, FULL),
    "full attention first": (FULL, SPARSE),
    "full attention around": (FULL, SPARSE, SPARSE, FULL),
}


@pytest.mark.parametrize("groups", ORDERS.values(), ids=ORDERS)
def test_checkpoints_are_counted_in_a_sparse_group_wherever_it_is(groups: tuple[Any, ...]) -> None:
    cache = Cache(*groups)
    end = IMAGE_END // BLOCK * BLOCK
    assert cache.compute(about_the_image(2)) == [end]
    assert counters.CHECKPOINTS_MADE.value == 1
    assert cache.hit(about_the_image(3)) == end
    cache.compute(about_the_image(3))
    assert counters.CHECKPOINTS_USED.value == 1


@pytest.mark.parametrize("groups", ORDERS.values(), ids=ORDERS)
def test_a_checkpoint_evicted_from_the_sparse_group_alone_is_gone(groups: tuple[Any, ...]) -> None:
    """What full attention still has of it is no position to resume at."""
    cache = Cache(*groups)
    cache.compute(about_the_image(2))
    cache.compute(Prompt((4,) * 100, (("another", 2, 8),)))
    assert counters.CHECKPOINTS_EVICTED_UNUSED.value == 0, "the control"
    cache.evict(groups.index(SPARSE), about_the_image(2), IMAGE_END // BLOCK * BLOCK)
    assert cache.hit(about_the_image(3)) == 0
    cache.compute(Prompt((5,) * 100, (("another", 2, 8),)))
    assert counters.CHECKPOINTS_EVICTED_UNUSED.value == 1


@pytest.mark.parametrize("draft_head", [False, True])
@pytest.mark.parametrize("length", [95, 96, 97, 111, 112, 113])
def test_what_vllm_keeps_by_itself_is_known_also_with_a_draft_head(length: int, draft_head: bool) -> None:
    """Where the same prompt and a longer one resume; with a draft head, vLLM matches a block more and drops it."""
    cache = Cache(FULL, SPARSE, draft_head=draft_head)
    cache.compute(Prompt((1,) * length))
    kept = cache.checkpoints._kept_by_vllm(length)
    same, longer = cache.hit(Prompt((1,) * length)), cache.hit(Prompt((1,) * length + (2,) * 50))
    assert {same, longer} <= kept
    for tokens in kept:
        shared = tokens + BLOCK * draft_head
        assert cache.hit(Prompt((1,) * shared + (2,) * 50)) == tokens > 0


@pytest.mark.parametrize("draft_head", [False, True])
def test_no_checkpoint_is_made_where_vllm_keeps_one_also_with_a_draft_head(draft_head: bool) -> None:
    """A question so short that vLLM's own position is that of the image's end."""
    cache = Cache(FULL, SPARSE, draft_head=draft_head)
    end = (IMAGE_END - BLOCK * draft_head) // BLOCK * BLOCK
    assert cache.compute(about_the_image(2, length=3)) == []
    assert cache.hit(about_the_image(3, length=3)) == end
    assert cache.compute(Prompt((4, *about_the_image(2).tokens[1:]), (IMAGE,))) == [end], "the control: a long question"


@pytest.mark.parametrize("draft_head", [False, True])
def test_the_second_question_resumes_at_the_checkpoint_also_with_a_draft_head(draft_head: bool) -> None:
    """A block behind a hit must be equal, too, with a draft head: the checkpoint is a block before the image's end."""
    cache = Cache(FULL, SPARSE, draft_head=draft_head)
    planned = cache.compute(about_the_image(2))
    assert planned == [(IMAGE_END - BLOCK * draft_head) // BLOCK * BLOCK]
    assert cache.hit(about_the_image(3)) == planned[0]


needs_lookahead = pytest.mark.skipif(
    "num_hash_lookahead_tokens" not in inspect.signature(KVCacheManager).parameters,
    reason="this vLLM's block keys don't look ahead; those of 0.33 do",
)


@needs_lookahead
@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("length", [95, 96, 97, 98, 99, 111, 112, 113])
def test_what_vllm_keeps_by_itself_is_known_also_where_keys_look_ahead(length: int, ahead: int) -> None:
    """The last block's key needs the tokens behind it; where the prompt lacks them, vLLM keeps none instead."""
    cache = Cache(FULL, SPARSE, key_lookahead=ahead)
    cache.compute(Prompt((1,) * length))
    (kept,) = cache.checkpoints._kept_by_vllm(length)
    assert kept == (length - 1) // BLOCK * BLOCK
    assert cache.hit(Prompt((1,) * length)) == (kept if kept + ahead <= length else 0)


@needs_lookahead
@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("end", [127, 128, 129, 130, 131, 132])
def test_the_second_question_resumes_at_the_checkpoint_also_where_keys_look_ahead(end: int, ahead: int) -> None:
    """The checkpoint is the last block behind which that many tokens of the image still come."""
    cache = Cache(FULL, SPARSE, key_lookahead=ahead)

    def about(word: int) -> Prompt:
        tokens = (1,) * IMAGE_START + (7,) * (end - IMAGE_START) + (word,) * 60
        return Prompt(tokens, (("image", IMAGE_START, end - IMAGE_START),))

    planned = cache.compute(about(2))
    assert planned == [(end - ahead) // BLOCK * BLOCK]
    assert cache.hit(about(3)) == planned[0]
