# SPDX-License-Identifier: Apache-2.0
"""Withdraws keys of KV blocks, so that no later request finds them. Engine process, main thread; imports no vLLM."""

from typing import Any


def withdraw_keys(kv_cache_manager: Any, request: Any) -> None:
    """A request is preempted: take away the keys of its blocks behind what is computed.

    vLLM publishes a block's key when it schedules the step that computes the block. A request that is preempted in the
    same step is not part of it, and nobody writes these blocks.
    """
    for manager in kv_cache_manager.coordinator.single_type_managers:
        blocks = manager.req_to_blocks.get(request.request_id, ())
        behind = blocks[request.num_computed_tokens // manager.block_size :]
        if published := {block.block_id for block in behind if block.block_hash is not None}:
            manager.block_pool.evict_blocks(published)


def withdraw_all_keys(kv_cache_manager: Any) -> None:
    """Take away the keys of all blocks, those that a request holds among them, for which vLLM's reset is refused."""
    pool = kv_cache_manager.block_pool
    if published := {block.block_id for block in pool.blocks if block.block_hash is not None}:
        pool.evict_blocks(published)
