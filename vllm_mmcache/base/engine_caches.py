# SPDX-License-Identifier: Apache-2.0
"""Takes back what vLLM's caches promise: keys of KV blocks, and encoder outputs. Engine process, main thread.

Imports no vLLM.
"""

from collections.abc import Set
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


def outputs_behind(encoder_cache_manager: Any, request: Any) -> set[str]:
    """The images of a request that is preempted whose encoder outputs nobody computes, by name.

    vLLM books an output when it schedules the step that computes it, as with the keys of blocks. It is of that step if
    its image lies behind what is computed.
    """
    return {
        request.mm_features[number].identifier
        for number in encoder_cache_manager.get_cached_input_ids(request)
        if request.mm_features[number].mm_position.offset >= request.num_computed_tokens
    }


def let_go_of_outputs(encoder_cache_manager: Any, names: Set[str]) -> None:
    """Encoder outputs that nobody refers to any more go before all others, as vLLM lets go of the oldest.

    Nothing goes where vLLM keeps none for later requests, as for models with an encoder and a decoder.
    """
    manager = encoder_cache_manager
    for name in names & getattr(manager, "freeable", {}).keys():
        size = manager.freeable.pop(name)
        del manager.cached[name]
        del manager.num_embeds_by_hash[name]
        manager.freed.append(name)
        manager.num_free_slots += size
