# SPDX-License-Identifier: Apache-2.0
"""Has vLLM make and keep the checkpoints of requests whose prompts are being computed. Engine process, its thread.

A step calls what has to know of checkpoints for every request: a hook there would cost all that decode. So nothing
stands in vLLM's classes. While some request has checkpoints to come, a few methods of this scheduler's own objects are
replaced, and they are given back when none has: in most steps vLLM runs as it is.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from vllm_mmcache.base import status
from vllm_mmcache.base.arguments import argument, named
from vllm_mmcache.base.failsafe import failsafe
from vllm_mmcache.components.image_checkpoints.positions import Checkpoint

Kept = Callable[[Any, Any, int, Sequence[Checkpoint]], None]
"""Told of a request, a manager of a group, the blocks that were cached before, and the request's checkpoints."""


class InsideChunks(Protocol):
    """Keeps states inside a chunk of a Mamba prefill, which need not end at a checkpoint then."""

    def want(self, request_id: str, start: int, checkpoints: tuple[int, ...], num_tokens: int) -> None:
        """A step may compute tokens of a request from `start` on; its checkpoints are in tokens, num_tokens all."""

    def fill(self, request_id: str, end: int, new_blocks: Sequence[list[Any]]) -> None:
        """The blocks of a chunk that ends at `end` are allocated; by group, as the workers will see them."""


inside_chunks: Callable[[Any], InsideChunks] | None = None
"""Makes that of a KV cache coordinator; None where the component inner_checkpoints is not installed."""


class Underway:
    """The checkpoints to come of one scheduler's requests."""

    def __init__(
        self, scheduler: Any, sparse: Sequence[Any], dropped_tokens: int, note_kept: Kept, *, is_recurrent: bool
    ) -> None:
        """sparse: the managers of the groups that keep states sparsely; the positions are kept in these.

        dropped_tokens: what vLLM matches behind a hit, and drops.
        """
        self._coordinator = scheduler.kv_cache_manager.coordinator
        self._scheduler: Any = weakref.proxy(scheduler)
        self._is_recurrent = is_recurrent
        self.inside = inside_chunks(self._coordinator) if is_recurrent and inside_chunks is not None else None
        self._sparse = sparse
        self._dropped_tokens = dropped_tokens
        self._note_kept = note_kept
        self._to_come: dict[str, tuple[weakref.ref[Any], tuple[Checkpoint, ...]]] = {}  # by request id
        self._is_armed = False

    def __len__(self) -> int:
        return len(self._to_come)

    @property
    def keeps_states_inside_chunks(self) -> bool:
        """Whether a state is kept without the end of a chunk, in all ranks."""
        return self.inside is not None and status.is_on("inner_checkpoints")

    def begin(self, request: Any, checkpoints: tuple[Checkpoint, ...]) -> None:
        """A request that was looked up is to have these. One that ends before it has them is forgotten with it."""
        name = request.request_id
        self._to_come.pop(name, None)
        if checkpoints:
            forget = weakref.ref(request, lambda _: self._to_come.pop(name, None))
            self._to_come[name] = forget, checkpoints
            self._arm()

    def end(self) -> None:
        """No request has checkpoints to come any more."""
        self._to_come.clear()
        if self._is_armed:
            self._disarm()

    def _arm(self) -> None:
        if self._is_armed:
            return
        self._is_armed = True
        to_come, coordinator = self._to_come, self._coordinator
        cache_blocks = coordinator.cache_blocks

        def cache_and_keep(request: Any, *args: Any, **kwargs: Any) -> Any:
            if request.request_id not in to_come:
                if not to_come:
                    self._disarm()
                return cache_blocks(request, *args, **kwargs)
            return self._keep(cache_blocks, request, args, kwargs)

        coordinator.cache_blocks = cache_and_keep
        if not self._is_recurrent:
            return
        split = self._scheduler._mamba_block_aligned_split

        def split_at_checkpoints(request: Any, *args: Any, **kwargs: Any) -> Any:
            if request.request_id not in to_come:
                return split(request, *args, **kwargs)
            return self._split(split, request, args, kwargs)

        self._scheduler._mamba_block_aligned_split = split_at_checkpoints
        if self.inside is None:
            return
        inside, allocate = self.inside, coordinator.allocate_new_blocks

        def allocate_and_fill(request_id: str, *args: Any, **kwargs: Any) -> Any:
            new_blocks = allocate(request_id, *args, **kwargs)
            if request_id in to_come:
                end = argument(allocate, (request_id, *args), kwargs, "num_tokens_main_model")
                inside.fill(request_id, end, new_blocks)
            return new_blocks

        coordinator.allocate_new_blocks = allocate_and_fill

    def _disarm(self) -> None:
        self._is_armed = False
        del self._coordinator.cache_blocks
        if self._is_recurrent:
            del self._scheduler._mamba_block_aligned_split
        if self.inside is not None:
            del self._coordinator.allocate_new_blocks

    def _split(self, split: Callable[..., Any], request: Any, args: Any, kwargs: Any) -> Any:
        """Scheduler._mamba_block_aligned_split for a chunk that does not run past a checkpoint.

        A state exists only where a chunk ends, or where the layers' kernels stop inside it.
        """
        given = named(split, (request, *args), kwargs)
        start = request.num_computed_tokens + sum(
            given.get(f"num_{where}_computed_tokens", 0) for where in ("new_local", "external")
        )
        checkpoints = self._to_come[request.request_id][1]
        if self.inside is not None and self.keeps_states_inside_chunks:
            positions = tuple(checkpoint.tokens for checkpoint in checkpoints)
            self.inside.want(request.request_id, start, positions, request.num_tokens)
            return split(**given)
        for checkpoint in checkpoints:
            if start < checkpoint.tokens < start + given["num_new_tokens"]:
                given["num_new_tokens"] = checkpoint.tokens - start
                break
        return split(**given)

    def _keep(self, cache_blocks: Callable[..., Any], request: Any, args: Any, kwargs: Any) -> Any:
        """KVCacheCoordinator.cache_blocks: in sparse groups, the checkpoints are positions to resume at, too."""
        checkpoints = self._to_come[request.request_id][1]
        for manager in self._sparse:
            manager.cache_blocks = self._keeping(manager, manager.cache_blocks, checkpoints)
        try:
            outcome = cache_blocks(request, *args, **kwargs)
        finally:
            for manager in self._sparse:
                # Not by its __dict__: once that is made, Python 3.11 reads all of the object's attributes more slowly.
                del manager.cache_blocks
        end = checkpoints[-1].tokens + self._dropped_tokens
        if all(one.num_cached_block.get(request.request_id, 0) * one.block_size >= end for one in self._sparse):
            del self._to_come[request.request_id]
        if not self._to_come:
            self._disarm()
        return outcome

    def _keeping(self, manager: Any, cache_blocks: Any, checkpoints: Sequence[Checkpoint]) -> Callable[..., Any]:
        positions = [checkpoint.tokens for checkpoint in checkpoints]

        def cache_and_count(request: Any, *args: Any, replay_boundaries: Sequence[int], **kwargs: Any) -> Any:
            before = manager.num_cached_block.get(request.request_id, 0)
            outcome = cache_blocks(request, *args, replay_boundaries=[*replay_boundaries, *positions], **kwargs)
            with failsafe("image_checkpoints"):
                self._note_kept(request, manager, before, checkpoints)
            return outcome

        return cache_and_count
