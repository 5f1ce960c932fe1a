# SPDX-License-Identifier: Apache-2.0
"""Gives the checkpoints inside a prefill chunk blocks of their own. Engine process, scheduler thread.

In a Mamba group vLLM leaves a hole in a request's list of blocks wherever no chunk ended. A checkpoint's block fills
such a hole; vLLM then caches and frees it like any other. A block's key is published when the step is scheduled, so
from then on the workers must write it, or raise: they are told of every block that was put into a hole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import MambaSpec

from vllm_mmcache.components.image_checkpoints import vllm_underway
from vllm_mmcache.components.inner_checkpoints.cuts import Cut


@dataclass(frozen=True)
class Wanted:
    """The checkpoints behind the first token that a step may compute of a request."""

    start: int
    """Tokens that are computed before the step."""
    checkpoints: tuple[int, ...]
    """In tokens from the prompt's start, in order."""
    num_tokens: int
    """Tokens of the whole request."""


class InnerBlocks:
    """The blocks of checkpoints in the step that is being scheduled."""

    def __init__(self, coordinator: Any) -> None:
        self.pool = coordinator.block_pool
        managers = coordinator.single_type_managers
        self.mamba = tuple(m for m in managers if isinstance(m.kv_cache_spec, MambaSpec))
        self.others = tuple(m for m in managers if not isinstance(m.kv_cache_spec, MambaSpec))
        self.wanted: dict[str, Wanted] = {}
        self.made: dict[str, tuple[Cut, ...]] = {}

    def want(self, request_id: str, start: int, checkpoints: tuple[int, ...], num_tokens: int) -> None:
        """Note the checkpoints of a request of which a step may compute tokens from `start` on."""
        if start < checkpoints[-1]:
            self.wanted[request_id] = Wanted(start, checkpoints, num_tokens)

    def fill(self, request_id: str, end: int, new_blocks: Sequence[list[Any]]) -> None:
        """Put blocks into the holes at a request's checkpoints, where there are enough; once its own are allocated.

        end: tokens that are computed after the step. new_blocks are what vLLM allocated by group, which it tells the
        workers. A checkpoint gets a block in every Mamba group, or none.
        """
        wanted = self.wanted.pop(request_id, None)
        if wanted is None:
            return
        spare = self.pool.get_num_free_blocks() - self._needed_later(request_id, wanted.num_tokens)
        cuts: list[Cut] = []
        for tokens in wanted.checkpoints:
            if not wanted.start < tokens < end or not all(self._has_hole(m, request_id, tokens) for m in self.mamba):
                continue
            spare -= len(self.mamba)
            if spare < 0:
                break
            blocks = self.pool.get_new_blocks(len(self.mamba))
            groups = {manager.kv_cache_group_id: block for manager, block in zip(self.mamba, blocks, strict=True)}
            cuts.append(Cut(tokens - wanted.start, {group: int(block.block_id) for group, block in groups.items()}))
            self.made[request_id] = tuple(cuts)  # before a key can be published
            for manager in self.mamba:
                block = groups[manager.kv_cache_group_id]
                held, new = manager.req_to_blocks[request_id], new_blocks[manager.kv_cache_group_id]
                column = tokens // manager.block_size - 1
                held[column] = block
                place = column - len(held) + len(new)  # both lists end with the same block
                if place >= 0 and new[place].is_null:
                    new[place] = block

    def take_cuts(self, scheduled: Any) -> dict[str, tuple[Cut, ...]]:
        """What the workers must write in the step that was scheduled, by request; and begin the next step.

        scheduled: the ids of the requests in it. One that was preempted after it had been given blocks is not in it:
        their keys are withdrawn.
        """
        self.wanted.clear()
        made, self.made = self.made, {}
        lost = {
            block for request_id in made.keys() - scheduled for cut in made[request_id] for block in cut.blocks.values()
        }
        if lost:
            self.pool.evict_blocks(lost)
        return {request_id: cuts for request_id, cuts in made.items() if request_id in scheduled}

    def _needed_later(self, request_id: str, num_tokens: int) -> int:
        """Blocks that the rest of the request's prefill takes: with fewer it would wait for those of its own holes."""
        held = (-(-num_tokens // m.block_size) - len(m.req_to_blocks[request_id]) for m in self.others)
        return sum(max(0, int(count)) for count in held) + 2 * len(self.mamba) + len(self.others)

    def _has_hole(self, manager: Any, request_id: str, tokens: int) -> bool:
        blocks = manager.req_to_blocks[request_id]
        column = tokens // manager.block_size - 1
        return tokens % manager.block_size == 0 and 0 <= column < len(blocks) - 1 and bool(blocks[column].is_null)


def install() -> None:
    """Have image_checkpoints keep states inside chunks, in schedulers that are made from now on."""
    vllm_underway.inside_chunks = InnerBlocks


def undo() -> None:
    """Have it end chunks again."""
    vllm_underway.inside_chunks = None
