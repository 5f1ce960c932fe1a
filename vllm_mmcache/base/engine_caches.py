# SPDX-License-Identifier: Apache-2.0
"""Removes entries of vLLM's caches whose data nobody computes: keys of KV blocks, and encoder outputs.

Engine process, main thread.

Imports no vLLM.
"""

from collections.abc import Set
from typing import Any


def withdraw_keys(kv_cache_manager: Any, request: Any) -> None:
    """A request is preempted: take away the keys of its blocks after the computed tokens.

    vLLM publishes a block's key when it schedules the step that computes the block. A request that is preempted in the
    same step is not part of it, so these blocks are never filled.
    """
    for manager in kv_cache_manager.coordinator.single_type_managers:
        blocks = manager.req_to_blocks.get(request.request_id, ())
        behind = blocks[request.num_computed_tokens // manager.block_size :]
        if published := {block.block_id for block in behind if block.block_hash is not None}:
            manager.block_pool.evict_blocks(published)


def withdraw_all_keys(kv_cache_manager: Any) -> None:
    """Take away the keys of all blocks, also of those that a request holds; with such, vLLM's own reset refuses.

    For when what lies in the blocks may be wrong.
    """
    pool = kv_cache_manager.block_pool
    if published := {block.block_id for block in pool.blocks if block.block_hash is not None}:
        pool.evict_blocks(published)


def uncomputed_outputs(encoder_cache_manager: Any, request: Any) -> set[str]:
    """The identifiers of those images of a preempted request whose encoder outputs will not be computed.

    vLLM marks an output as cached when it schedules the step that computes it, like the key of a block. An image that
    ends after the computed tokens may belong to the step that the request was taken out of, also where the image's
    range begins before: with text, or with what a cached prefix covers. All others were encoded in earlier steps.
    """
    return {
        request.mm_features[index].identifier
        for index in encoder_cache_manager.get_cached_input_ids(request)
        if _end_of(request.mm_features[index].mm_position) > request.num_computed_tokens
    }


def _end_of(position: Any) -> int:
    return int(position.offset + position.length)


def evict_outputs(encoder_cache_manager: Any, identifiers: Set[str]) -> None:
    """Remove encoder outputs at once, as vLLM removes the oldest when it needs room.

    To be called when their request has been freed. Those that another request refers to stay. If that one is part of
    the same step, nobody computes the output, and the engine ends, as stock vLLM's does (docs/limits.md). Does nothing
    for models with an encoder and a decoder, of whose outputs vLLM keeps none for later requests.
    """
    manager = encoder_cache_manager
    for identifier in identifiers & getattr(manager, "freeable", {}).keys():
        manager.num_free_slots += manager.freeable.pop(identifier)  # they are freeable slots already
        del manager.cached[identifier]
        del manager.num_embeds_by_hash[identifier]
        manager.freed.append(identifier)
