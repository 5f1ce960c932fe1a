# SPDX-License-Identifier: Apache-2.0
"""Checkpoints inside a chunk get blocks on vLLM's own KV cache manager: which are hits, what is freed, when not."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

from tests.support.vllm_requests import Prompt, make_request, our_hasher
from vllm_mmcache.base import engine_caches
from vllm_mmcache.components.image_checkpoints.vllm_planner import PLAN, Checkpoints
from vllm_mmcache.components.inner_checkpoints import vllm_blocks
from vllm_mmcache.components.inner_checkpoints.cuts import Cut
from vllm_mmcache.components.inner_checkpoints.vllm_blocks import InnerBlocks, Wanted

pytestmark = pytest.mark.answers

BLOCK = 16
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
MAMBA = MambaSpec(block_size=BLOCK, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")
GROUPS = (MAMBA, MAMBA, FULL)
IMAGE = ("image", 20, 112)
CHECKPOINTS = (64, 128)


def about_the_image(word: int, length: int = 260) -> Prompt:
    """A question about the same image; two of them differ from the image's end on."""
    tokens = (1,) * 20 + (7,) * 112 + (word,) * (length - 132)
    return Prompt(tokens, (IMAGE,))


class Scheduler:
    """What the checkpoints of a scheduler read of it."""

    need_mamba_block_aligned_split = True
    max_num_scheduled_tokens = 1024

    def __init__(self, manager: KVCacheManager) -> None:
        self.kv_cache_manager = manager

    def _mamba_block_aligned_split(self, request: Any, num_new_tokens: int) -> int:
        return num_new_tokens


class Cache:
    """vLLM's KV cache manager for two Mamba groups and one of full attention, and the blocks of its checkpoints."""

    def __init__(self, num_blocks: int = 100) -> None:
        config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(GROUPS)],
            prefix_cache_retention_interval=0,  # of sparse groups vLLM keeps the prompt's end alone
        )
        self.manager = KVCacheManager(config, max_model_len=1024, scheduler_block_size=BLOCK, hash_block_size=BLOCK)
        self.hasher = our_hasher(BLOCK, sha256)
        self.scheduler = Scheduler(self.manager)
        self.checkpoints = Checkpoints(self.scheduler)
        assert isinstance(self.checkpoints.underway.inside, InnerBlocks)
        self.inner = self.checkpoints.underway.inside

    def request(self, prompt: Prompt) -> Any:
        return make_request(prompt, self.hasher)

    def hit(self, prompt: Prompt) -> int:
        """How many tokens of a prompt are cached, as the next step would find them."""
        self.manager.new_step_starts()
        return int(self.manager.get_computed_blocks(self.request(prompt))[1])

    def chunk(self, request: Any, end: int, checkpoints: tuple[int, ...] = CHECKPOINTS) -> Any:
        """Allocate a chunk from what is computed to `end`, as the scheduler does; the blocks that workers are told."""
        self.checkpoints.plan(request, 0, 0)
        plan = getattr(request, PLAN)
        assert {checkpoint.tokens for checkpoint in plan.checkpoints} <= set(CHECKPOINTS) | {16}
        self.inner.wanted[request.request_id] = Wanted(request.num_computed_tokens, checkpoints, request.num_tokens)
        new_blocks = self.manager.allocate_slots(request, end - request.num_computed_tokens)
        request.num_computed_tokens = end
        return new_blocks

    def num_free(self) -> int:
        return int(self.manager.block_pool.get_num_free_blocks())


@pytest.fixture(autouse=True)
def installed(no_role: None) -> Iterator[None]:
    """States are kept inside chunks by the schedulers of a test."""
    vllm_blocks.install()
    yield
    vllm_blocks.undo()


def test_a_state_inside_a_chunk_is_a_hit_and_the_workers_are_told_of_its_blocks() -> None:
    cache = Cache()
    request = cache.request(about_the_image(2))
    told = cache.chunk(request, 256)
    (cut,) = cache.inner.take_cuts({"r"})["r"][-1:]
    assert cut.offset == 128
    assert cut.blocks == {group: told.blocks[group][7].block_id for group in (0, 1)}
    assert len(set(cut.blocks.values()) - {0}) == 2, "two blocks that are not the null block"
    assert cache.hit(about_the_image(3)) == 128
    assert not cache.inner.made
    assert not cache.inner.wanted


def test_without_a_block_there_is_no_hit() -> None:
    """Negative control, what vLLM does by itself."""
    cache = Cache()
    cache.chunk(cache.request(about_the_image(2)), 256, checkpoints=())
    assert cache.inner.take_cuts({"r"}) == {}
    assert cache.hit(about_the_image(3)) == 0


def test_only_checkpoints_strictly_inside_the_chunk_get_blocks() -> None:
    """A chunk that begins or ends at one has its state anyway."""
    cache = Cache()
    request = cache.request(about_the_image(2))
    cache.chunk(request, 64)
    assert cache.inner.take_cuts({"r"}) == {}
    cache.chunk(request, 128)
    assert cache.inner.take_cuts({"r"}) == {}
    cache.chunk(request, 256)
    assert cache.inner.take_cuts({"r"}) == {}
    assert cache.hit(about_the_image(3)) == 128


def test_blocks_are_freed_once_the_next_step_is_scheduled() -> None:
    """So a request holds no more blocks than without checkpoints; the states stay hits."""
    ends = {}
    for checkpoints in ((), CHECKPOINTS):
        cache = Cache()
        request = cache.request(about_the_image(2))
        cache.chunk(request, 240, checkpoints)
        cache.chunk(request, 256, ())
        ends[checkpoints] = cache.num_free()
        assert cache.hit(about_the_image(3)) == (128 if checkpoints else 0)
        cache.manager.free(request)
        assert cache.num_free() == 99, "all but the null block"
    assert ends[()] == ends[CHECKPOINTS]


@pytest.mark.parametrize("spare", range(-2, 6))
def test_a_checkpoint_needs_more_than_the_rest_of_the_prefill(spare: int) -> None:
    """With fewer blocks, the request's next chunk would wait for what its own checkpoints hold.

    It goes on alone in every case, and never takes a block that another group of the same chunk needs.
    """
    for_chunk, for_rest = 2 + 10, 2 * 2 + 1 + 7  # of 160 tokens, then of 260; states may take two blocks per group
    cache = Cache(num_blocks=1 + for_chunk + for_rest + spare)
    request = cache.request(about_the_image(2))
    assert cache.chunk(request, 160) is not None
    cuts = cache.inner.take_cuts({"r"}).get("r", ())
    assert len(cuts) == max(0, min(2, spare // 2)), "two blocks each"
    assert cache.chunk(request, 256) is not None
    assert cache.chunk(request, 260) is not None


def test_keys_of_a_request_that_was_preempted_in_the_same_step_are_withdrawn() -> None:
    """Nobody writes its states, though their keys were published when its blocks were allocated."""
    cache = Cache()
    request = cache.request(about_the_image(2))
    cache.chunk(request, 256)
    assert cache.hit(about_the_image(3)) == 128, "the control"
    cache.manager.free(request)
    assert cache.inner.take_cuts(set()) == {}
    assert cache.hit(about_the_image(3)) == 0


def test_all_keys_can_be_withdrawn_while_a_request_holds_its_blocks() -> None:
    """vLLM refuses to reset the cache then. The request goes on with its blocks."""
    cache = Cache()
    request = cache.request(about_the_image(2))
    cache.chunk(request, 256)
    assert not cache.manager.reset_prefix_cache()
    assert cache.hit(about_the_image(3)) == 128, "the control"
    engine_caches.withdraw_all_keys(cache.manager)
    assert cache.hit(about_the_image(3)) == 0
    assert cache.chunk(request, 260) is not None


def test_what_was_wanted_in_a_step_is_not_remembered() -> None:
    """A request that was not scheduled after all has its checkpoints noted again when it is."""
    cache = Cache()
    cache.inner.wanted["r"] = Wanted(0, CHECKPOINTS, 260)
    assert cache.inner.take_cuts({"other"}) == {}
    assert not cache.inner.wanted


def test_cuts_travel_to_other_processes() -> None:
    cuts = {"r": (Cut(3, {0: 5}),)}
    assert pickle.loads(pickle.dumps(cuts)) == cuts
