# SPDX-License-Identifier: Apache-2.0
"""Plans and keeps the image checkpoints of one scheduler. Engine process."""

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from vllm_mmcache.base import settings
from vllm_mmcache.components.image_checkpoints.backoff import Backoff, TrackedCheckpoints
from vllm_mmcache.components.image_checkpoints.positions import KINDS, Checkpoint, candidates, choose
from vllm_mmcache.metrics import counters, table_sizes

PLAN = "_mmcache_checkpoint_plan"
"""The attribute of a vLLM request that holds its Plan."""


@dataclass(frozen=True)
class Plan:
    """What was chosen for one request; an attribute of it."""

    owner: "Checkpoints"
    hit_tokens: int
    kinds: frozenset[str]  # asked of the backoff once per request, whatever happens to it
    checkpoints: tuple[Checkpoint, ...]


class Checkpoints:
    """What one scheduler knows about its checkpoints.

    A request carries its own plan as an attribute, chosen when it is looked up and again when it comes back after a
    preemption, since its hit may be another one.
    """

    def __init__(self, scheduler: Any) -> None:
        coordinator = scheduler.kv_cache_manager.coordinator
        self.pool = scheduler.kv_cache_manager.block_pool
        self.block_tokens = coordinator.scheduler_block_size
        self.dropped_tokens = _dropped_tokens(coordinator)
        # From vLLM 0.33 on, a block's key may cover tokens behind it instead.
        self.lookahead_tokens = self.dropped_tokens + int(getattr(self.pool, "num_hash_lookahead_tokens", 0))
        self.group = next(m for m in coordinator.single_type_managers if is_sparse(m)).kv_cache_group_id
        self.backoff = Backoff()
        self.tracked = TrackedCheckpoints(self.backoff)
        table_sizes.of_engine("checkpoints", self.tracked.size)
        self._cached = self.pool.cached_block_hash_to_block

    def plan(self, request: Any, hit_tokens: int, junction_tokens: int) -> None:
        """Choose the checkpoints of a request that was looked up; every step anew while it waits, which is cheap."""
        if self._cached is not self.pool.cached_block_hash_to_block:  # reset_prefix_cache makes a new one
            self._cached = self.pool.cached_block_hash_to_block
            self.tracked.clear()
        kept = getattr(request, PLAN, None)
        if kept is not None and kept.hit_tokens == hit_tokens:
            return
        if hit_tokens and self.tracked.use(self._key(request, hit_tokens)):
            counters.CHECKPOINTS_USED.add()
            counters.CHECKPOINT_TOKENS_SAVED.add(hit_tokens)
        if not request.mm_features:
            setattr(request, PLAN, Plan(self, hit_tokens, frozenset(), ()))
            return
        ranges = [(f.mm_position.offset, f.mm_position.length) for f in request.mm_features]
        found = candidates(ranges, hit_tokens, self.block_tokens, self.lookahead_tokens)
        junction = junction_tokens // self.block_tokens * self.block_tokens
        for checkpoint in found:
            if checkpoint.tokens == junction:  # it would have been used
                self.backoff.record_hit(checkpoint.kinds)
        counters.CHECKPOINTS_EVICTED_UNUSED.add(self.tracked.sweep(self._is_cached))
        if kept is None:
            kinds = self.backoff.ask()
            counters.CHECKPOINT_REQUESTS_BACKED_OFF.add(kinds != KINDS)
        else:
            kinds = kept.kinds
        in_force = settings.current()
        by_vllm = {junction, *self._kept_by_vllm(request.num_prompt_tokens)}
        chosen = choose(found, by_vllm, kinds, in_force.checkpoints_per_request, in_force.checkpoint_min_tokens)
        setattr(request, PLAN, Plan(self, hit_tokens, kinds, chosen))

    def _kept_by_vllm(self, num_prompt_tokens: int) -> set[int]:
        """Where the same prompt, or a longer one, resumes; a block earlier where one is matched and dropped."""
        ends = [num_prompt_tokens - 1, *([num_prompt_tokens] if self.dropped_tokens else [])]
        dropped = self.block_tokens if self.dropped_tokens else 0
        return {end // self.block_tokens * self.block_tokens - dropped for end in ends}

    def note_kept(self, request: Any, manager: Any, before: int, checkpoints: tuple[Checkpoint, ...]) -> None:
        """Count what was kept of one group, from block `before` on."""
        blocks = manager.req_to_blocks[request.request_id]
        after = manager.num_cached_block.get(request.request_id, 0)
        window = getattr(manager.kv_cache_spec, "sliding_window", 1)
        proof = int(_drops_last_block(manager))  # blocks
        for checkpoint in checkpoints:
            end = checkpoint.tokens // manager.block_size
            if not before < end + proof <= after or blocks[end - 1].block_hash is None:
                continue
            first = max(before, end - -(-(window - 1) // manager.block_size), 0)
            kept = [block for block in blocks[min(first, end - 1) : end + proof] if block.block_hash is not None]
            if manager.kv_cache_group_id == self.group and self.tracked.add(
                self._key(request, checkpoint.tokens), checkpoint
            ):
                counters.CHECKPOINTS_MADE.add()
            counters.CHECKPOINT_BLOCKS.add(len(kept))

    def _key(self, request: Any, tokens: int) -> bytes:
        """The block key of the prefix of `tokens` tokens, which says everything that the prefix depends on.

        tokens: at least one block.
        """
        return bytes(request.block_hashes[tokens // self.pool.hash_block_size - 1])

    def _is_cached(self, key: bytes) -> bool:
        return self.pool.get_cached_block(BlockHash(key), [self.group]) is not None


def is_sparse(manager: Any) -> bool:
    """Whether this group of layers keeps the states of a few positions alone: a sliding window, or Mamba."""
    return isinstance(manager.kv_cache_spec, SlidingWindowSpec | MambaSpec)


def _drops_last_block(manager: Any) -> bool:
    """Whether vLLM matches a block behind a hit in this group, and drops it."""
    return manager.use_eagle and not isinstance(manager.kv_cache_spec, MambaSpec)


def _dropped_tokens(coordinator: Any) -> int:
    """What vLLM matches behind a hit and drops, in tokens; 0 without a draft head, and where keys look ahead."""
    return max(
        (manager.block_size for manager in coordinator.single_type_managers if _drops_last_block(manager)), default=0
    )
