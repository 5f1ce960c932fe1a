# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at image boundaries, in vLLM's scheduler and KV cache. Engine process, scheduler thread.

When a request is looked up in the prefix cache, its checkpoints are chosen. A Mamba prefill then ends a chunk at each
(a state exists only where a chunk ends), and when the blocks are cached, the positions are handed to vLLM as further
positions to resume at. Which blocks that means is vLLM's own calculation. Never changes what a block key says.
"""

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from vllm_mmcache.base import settings, status
from vllm_mmcache.base.arguments import argument, named
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.base.status import State
from vllm_mmcache.components.image_checkpoints.backoff import Backoff, TrackedCheckpoints
from vllm_mmcache.components.image_checkpoints.positions import KINDS, Checkpoint, candidates, choose
from vllm_mmcache.hooking.hook import Hooks
from vllm_mmcache.metrics import counters, table_sizes

_COMPONENT = "_mmcache_checkpoints"
_PLAN = "_mmcache_checkpoint_plan"


hook = Hooks(
    "image_checkpoints",
    "engine",
    upstream="56818",
    remove_when="vLLM keeps the states at image boundaries",
)


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler._get_local_prefix_cache_hit",
    name="plan",
    args=("request",),
    why="sparse retention keeps a state at the prompt's end alone: the second question about an image misses",
    upstream="43587, 51250, 45238, 48435; 56818 proposes a stop at the last image's end for Mamba",
)
def plan_checkpoints(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler._get_local_prefix_cache_hit: chooses the request's checkpoints behind its hit."""
    outcome = wrapped(*args, **kwargs)
    with failsafe("image_checkpoints"):
        component = _component_of(instance)
        if component is not None:
            request = argument(wrapped, args, kwargs, "request")
            component.plan(request, hit_tokens=outcome[1], junction_tokens=outcome[2])
    return outcome


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split",
    name="split",
    args=("request", "num_new_tokens", "num_new_local_computed_tokens", "num_external_computed_tokens"),
    why="a Mamba state exists only where a prefill chunk ends",
)
def stop_at_checkpoints(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler._mamba_block_aligned_split: asks for a chunk that does not run past a checkpoint."""
    request = argument(wrapped, args, kwargs, "request")
    checkpoints = _plan_of(request)
    if not checkpoints:  # most requests, in every step
        return wrapped(*args, **kwargs)
    given = named(wrapped, args, kwargs)
    found = [argument(wrapped, args, kwargs, f"num_{where}_computed_tokens") for where in ("new_local", "external")]
    start = request.num_computed_tokens + sum(found)
    end = start + given["num_new_tokens"]
    for checkpoint in checkpoints:
        if start < checkpoint.tokens < end:
            given["num_new_tokens"] = checkpoint.tokens - start
            break
    return wrapped(**given)


@hook(
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.cache_blocks",
    name="keep",
    args=("request", "replay_boundaries"),
    why="the blocks at image boundaries are to be found by later requests",
)
def keep_checkpoints(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of SingleTypeKVCacheManager.cache_blocks: the checkpoints are positions to resume at, too."""
    request = argument(wrapped, args, kwargs, "request")
    checkpoints = _plan_of(request)
    if not checkpoints or not isinstance(instance.kv_cache_spec, SlidingWindowSpec | MambaSpec):
        return wrapped(*args, **kwargs)
    kwargs = kwargs | {"replay_boundaries": [*kwargs["replay_boundaries"], *(c.tokens for c in checkpoints)]}
    before = instance.num_cached_block.get(request.request_id, 0)
    outcome = wrapped(*args, **kwargs)
    with failsafe("image_checkpoints"):
        getattr(request, _PLAN).component.note_kept(request, instance, before, checkpoints)
    return outcome


@dataclass(frozen=True)
class Plan:
    """What was chosen for one request; an attribute of it."""

    component: "Checkpoints"
    hit_tokens: int
    kinds: frozenset[str]  # asked of the learner once per request, whatever happens to it
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
        self.proof_tokens = _proof_tokens(coordinator)
        self.group = next(m for m in coordinator.single_type_managers if _is_sparse(m)).kv_cache_group_id
        self.backoff = Backoff()
        self.live = TrackedCheckpoints(self.backoff)
        table_sizes.of_engine("checkpoints", self.live.size)
        self._cached = self.pool.cached_block_hash_to_block

    def plan(self, request: Any, hit_tokens: int, junction_tokens: int) -> None:
        """Choose the checkpoints of a request that was looked up; every step anew while it waits, which is cheap."""
        if self._cached is not self.pool.cached_block_hash_to_block:  # reset_prefix_cache makes a new one
            self._cached = self.pool.cached_block_hash_to_block
            self.live.clear()
        kept = getattr(request, _PLAN, None)
        if kept is not None and kept.hit_tokens == hit_tokens:
            return
        if hit_tokens and self.live.use(self._key(request, hit_tokens)):
            counters.CHECKPOINTS_USED.add()
            counters.CHECKPOINT_TOKENS_SAVED.add(hit_tokens)
        if not request.mm_features:
            setattr(request, _PLAN, Plan(self, hit_tokens, frozenset(), ()))
            return
        ranges = [(f.mm_position.offset, f.mm_position.length) for f in request.mm_features]
        found = candidates(ranges, hit_tokens, self.block_tokens, self.proof_tokens)
        junction = junction_tokens // self.block_tokens * self.block_tokens
        for checkpoint in found:
            if checkpoint.tokens == junction:  # it would have been used
                self.backoff.record_hit(checkpoint.kinds)
        counters.CHECKPOINTS_EVICTED_UNUSED.add(self.live.sweep(self._is_cached))
        if kept is None:
            kinds = self.backoff.ask()
            counters.CHECKPOINT_REQUESTS_BACKED_OFF.add(kinds != KINDS)
        else:
            kinds = kept.kinds
        in_force = settings.current()
        by_vllm = {junction, *self._kept_by_vllm(request.num_prompt_tokens)}
        chosen = choose(found, by_vllm, kinds, in_force.checkpoints_per_request, in_force.checkpoint_min_tokens)
        setattr(request, _PLAN, Plan(self, hit_tokens, kinds, chosen))

    def _kept_by_vllm(self, num_prompt_tokens: int) -> set[int]:
        """Where the same prompt, or a longer one, resumes; a block earlier where one is matched and dropped."""
        ends = [num_prompt_tokens - 1, *([num_prompt_tokens] if self.proof_tokens else [])]
        dropped = self.block_tokens if self.proof_tokens else 0
        return {end // self.block_tokens * self.block_tokens - dropped for end in ends}

    def note_kept(self, request: Any, manager: Any, before: int, checkpoints: tuple[Checkpoint, ...]) -> None:
        """Count what was kept of one group, from block `before` on."""
        blocks = manager.req_to_blocks[request.request_id]
        after = manager.num_cached_block.get(request.request_id, 0)
        window = getattr(manager.kv_cache_spec, "sliding_window", 1)
        proof = int(_is_proven(manager))  # blocks
        for checkpoint in checkpoints:
            end = checkpoint.tokens // manager.block_size
            if not before < end + proof <= after or blocks[end - 1].block_hash is None:
                continue
            first = max(before, end - -(-(window - 1) // manager.block_size), 0)
            kept = [block for block in blocks[min(first, end - 1) : end + proof] if block.block_hash is not None]
            if manager.kv_cache_group_id == self.group and self.live.add(
                self._key(request, checkpoint.tokens), checkpoint
            ):
                counters.CHECKPOINTS_MADE.add()
            counters.CHECKPOINT_BLOCKS.add(len(kept))

    def _key(self, request: Any, tokens: int) -> bytes:
        """The block key of the prefix of `tokens` tokens, which says everything that the prefix depends on."""
        return bytes(request.block_hashes[tokens // self.pool.hash_block_size - 1])

    def _is_cached(self, key: bytes) -> bool:
        return self.pool.get_cached_block(BlockHash(key), [self.group]) is not None


def report_applicability(scheduler: Any) -> None:
    """Say where there is nothing to keep; when the scheduler is made. Engine process."""
    if _component_of(scheduler) is None:
        status.put("engine", "image_checkpoints", State("unneeded", "this model keeps every block's KV"))


def _component_of(scheduler: Any) -> Checkpoints | None:
    """The scheduler's checkpoints; None where nothing is kept sparsely, or where they are off."""
    if not hasattr(scheduler, _COMPONENT):
        manager = scheduler.kv_cache_manager
        is_sparse = manager.enable_caching and any(map(_is_sparse, manager.coordinator.single_type_managers))
        setattr(scheduler, _COMPONENT, Checkpoints(scheduler) if is_sparse else None)
    found: Checkpoints | None = getattr(scheduler, _COMPONENT)
    return found if status.is_on("image_checkpoints") else None


def _plan_of(request: Any) -> tuple[Checkpoint, ...]:
    plan = getattr(request, _PLAN, None)
    return plan.checkpoints if plan is not None else ()


def _is_sparse(manager: Any) -> bool:
    return isinstance(manager.kv_cache_spec, SlidingWindowSpec | MambaSpec)


def _is_proven(manager: Any) -> bool:
    """Whether vLLM matches a block behind a hit in this group, and drops it."""
    return manager.use_eagle and not isinstance(manager.kv_cache_spec, MambaSpec)


def _proof_tokens(coordinator: Any) -> int:
    """What must be equal behind a hit for one to end there, in tokens; 0 without a draft head."""
    return max((manager.block_size for manager in coordinator.single_type_managers if _is_proven(manager)), default=0)
