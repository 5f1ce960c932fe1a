# SPDX-License-Identifier: Apache-2.0
"""Plans and keeps the image checkpoints of one scheduler. Engine process."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from vllm_mmcache.base import settings, uses
from vllm_mmcache.components.image_checkpoints.backoff import Backoff, TrackedCheckpoints
from vllm_mmcache.components.image_checkpoints.expected_value import Prefill, Rate, ReuseRates, pays
from vllm_mmcache.components.image_checkpoints.positions import KINDS, Checkpoint, candidates, choose
from vllm_mmcache.components.image_checkpoints.step_cost import StepCost
from vllm_mmcache.components.image_checkpoints.vllm_underway import Underway
from vllm_mmcache.metrics import counters, table_sizes

CHECKPOINTS = "_mmcache_checkpoints"
"""The attribute of a vLLM scheduler that holds its Checkpoints; None where nothing is kept sparsely."""

PLAN = "_mmcache_checkpoint_plan"
"""The attribute of a vLLM request that holds its Plan."""


@dataclass(frozen=True)
class Plan:
    """What was chosen for one request; an attribute of it."""

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
        self._managers = coordinator.single_type_managers
        self._sparse = [manager for manager in self._managers if is_sparse(manager)]
        self._dense = [manager for manager in self._managers if not is_sparse(manager)]
        self.group = self._sparse[0].kv_cache_group_id
        self.is_recurrent = bool(getattr(scheduler, "need_mamba_block_aligned_split", False))
        """Whether some layers have a state that exists only where their kernel stops."""
        self.budget_tokens = getattr(scheduler, "max_num_scheduled_tokens", 0) // self.block_tokens * self.block_tokens
        self.underway = Underway(
            scheduler, self._sparse, self.dropped_tokens, self.note_kept, is_recurrent=self.is_recurrent
        )
        self.rates = ReuseRates()
        self.reused = Rate(0.0)
        """The share of a prompt's tokens that is reused."""
        self.step_cost = StepCost()
        self._last_output_s: float | None = None
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
        if kept is None or kept.hit_tokens != hit_tokens:
            self._choose(request, kept, hit_tokens, junction_tokens)
        self.underway.begin(request, getattr(request, PLAN).checkpoints)

    @property
    def ends_chunks(self) -> bool:
        """Whether a checkpoint ends a chunk of the prefill.

        Not where states are kept inside one: then none costs a step, and what one costs is memory.
        """
        return self.is_recurrent and not self.underway.keeps_states_inside_chunks

    def note_step(self, scheduler: Any, scheduler_output: Any) -> None:
        """A step's output has come: learn what steps with a prefill cost, where a checkpoint adds some.

        Steps are computed one after the other, so one takes the time between its output and the one before, unless
        nothing was to be computed in between.
        """
        if not self.ends_chunks:
            return
        now, before = perf_counter(), self._last_output_s
        self._last_output_s = now if scheduler.running else None
        tokens = scheduler_output.total_num_scheduled_tokens
        if before is not None and tokens > 2 * len(scheduler_output.num_scheduled_tokens):
            self.step_cost.add(tokens, now - before)

    def _choose(self, request: Any, kept: Plan | None, hit_tokens: int, junction_tokens: int) -> None:
        used = self.tracked.use(self._key(request, hit_tokens)) if hit_tokens else None
        if used is not None:
            counters.CHECKPOINTS_USED.add()
            counters.CHECKPOINT_TOKENS_SAVED.add(hit_tokens)
            inside = self.underway.keeps_states_inside_chunks
            uses.note(request, "inner_checkpoints" if inside else "image_checkpoints")
        if kept is None:
            self.reused.record(hit_tokens / request.num_tokens)
        if not request.mm_features:
            setattr(request, PLAN, Plan(hit_tokens, frozenset(), ()))
            return
        ranges = [(f.mm_position.offset, f.mm_position.length) for f in request.mm_features]
        found = candidates(ranges, hit_tokens, self.block_tokens, self.lookahead_tokens)
        junction = junction_tokens // self.block_tokens * self.block_tokens
        missed = max((one for one in found if one.tokens <= junction), key=lambda one: one.tokens, default=None)
        if missed is not None:  # it would have been used
            self.backoff.record_hit(missed.kinds)
        counters.CHECKPOINTS_EVICTED_UNUSED.add(self.tracked.sweep(self._is_cached))
        salt = request.cache_salt or ""
        if kept is None:
            kinds = self.backoff.ask()
            reused = missed or used
            self.rates.record(salt, found, reused, _image_of(request, reused))
        else:
            kinds = kept.kinds
        in_force = settings.current()
        by_vllm = {junction, *self._kept_by_vllm(request.num_prompt_tokens)}
        prefill = Prefill(hit_tokens, request.num_tokens, self.budget_tokens, ranges)
        refused = 0

        def is_worth_its_steps(checkpoint: Checkpoint, chosen: Sequence[int]) -> bool:
            nonlocal refused
            before = max((tokens for tokens in (hit_tokens, *chosen) if tokens < checkpoint.tokens), default=0)
            rate = self.rates.expected(checkpoint, salt, _image_of(request, checkpoint))
            cost = self.cost_tokens(prefill, by_vllm, checkpoint.tokens, chosen)
            is_worth = pays(rate, checkpoint.tokens - before, cost)
            refused += not is_worth and checkpoint.is_likely
            return is_worth

        chosen = choose(
            found, by_vllm, kinds, in_force.checkpoints_per_request, in_force.checkpoint_min_tokens, is_worth_its_steps
        )
        if kept is None:
            for checkpoint in chosen:
                self.rates.made(checkpoint, salt, _image_of(request, checkpoint))
            counters.CHECKPOINT_REQUESTS_BACKED_OFF.add(kinds != KINDS or refused > 0)
        setattr(request, PLAN, Plan(hit_tokens, kinds, chosen))

    def cost_tokens(self, prefill: Prefill, stops: Collection[int], tokens: int, chosen: Sequence[int]) -> float:
        """What a checkpoint at `tokens` costs in addition to those already chosen, in tokens: its steps, its memory.

        stops: where chunks of the prefill end without any checkpoint.
        """
        cost = self._displaced_tokens(prefill, tokens, len(chosen))
        if self.ends_chunks and self.budget_tokens:
            cost += prefill.extra_steps({*stops, *chosen}, tokens) * self.step_cost.tokens
        return cost

    def _displaced_tokens(self, prefill: Prefill, tokens: int, num_chosen: int) -> float:
        """What the memory of a checkpoint at `tokens` costs, in tokens that other requests will compute again.

        Zero while enough blocks are unused. Otherwise the checkpoint displaces as many blocks as it takes. Each is
        worth the tokens that a block of this prompt holds on average, times the share of a prompt that is reused.
        """
        checkpoint_blocks = blocks_to_resume(self._sparse, tokens)
        prompt_blocks = blocks_to_resume(self._managers, prefill.end)
        cached_blocks = blocks_to_resume(self._dense, prefill.start)  # a sparse group still needs blocks of its own
        needed_blocks = prompt_blocks - cached_blocks + (num_chosen + 1) * checkpoint_blocks
        if self.pool.num_gpu_blocks - len(self._cached) >= needed_blocks:
            return 0.0
        return self.reused.expected() * prefill.end * checkpoint_blocks / prompt_blocks

    def _kept_by_vllm(self, num_prompt_tokens: int) -> set[int]:
        """Where the same prompt, or a longer one, resumes; a block earlier where one is matched and dropped."""
        ends = [num_prompt_tokens - 1, *([num_prompt_tokens] if self.dropped_tokens else [])]
        dropped = self.block_tokens if self.dropped_tokens else 0
        return {end // self.block_tokens * self.block_tokens - dropped for end in ends}

    def note_kept(self, request: Any, manager: Any, before: int, checkpoints: Sequence[Checkpoint]) -> None:
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


def _image_of(request: Any, checkpoint: Checkpoint | None) -> str:
    """Of the image whose end a checkpoint is, vLLM's name; empty where it is no image's."""
    number = None if checkpoint is None else checkpoint.ending_image
    features = request.mm_features
    return str(features[number].identifier) if number is not None and number < len(features) else ""


def blocks_to_resume(managers: Sequence[Any], tokens: int) -> int:
    """Blocks that these groups keep so that a request can resume after `tokens` tokens.

    That is every block of full attention, the blocks of a sliding window, and the one that holds a Mamba state.
    """
    count = 0
    for manager in managers:
        kept_tokens = tokens
        if is_sparse(manager):
            kept_tokens = min(tokens, getattr(manager.kv_cache_spec, "sliding_window", 2) - 1)  # 1 of a Mamba state
        count += -(-kept_tokens // manager.block_size)
    return count


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
