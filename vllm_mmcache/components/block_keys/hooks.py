# SPDX-License-Identifier: Apache-2.0
"""The only file of this component that touches vLLM: hands the engine our block hasher in place of its own.

It also takes back keys of blocks, and encoder outputs, that are not computed after all.

The hasher is made in the engine process when EngineCore is built. The choice is fixed then: switching midway would mix
two key spaces. Only where the component is switched off for good do all requests get vLLM's keys (`give_back`). KV
events are untouched: they carry the extra keys that vLLM's own generator returns.
"""

import functools
import inspect
import logging
import weakref
from typing import Any

from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils

from vllm_mmcache.base import engine_caches, status
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.base.status import State
from vllm_mmcache.components.block_keys import layout
from vllm_mmcache.components.block_keys.hasher import BlockHasher
from vllm_mmcache.components.block_keys.layouts import CUMULATIVE, layout_report
from vllm_mmcache.hooking.hook import Hooks

logger = logging.getLogger("vllm.mmcache")

_DIGESTS = {"sha256": layout.sha256_digest, "xxhash": layout.xxhash_digest}
_SIGNATURE = inspect.signature(kv_cache_utils.get_request_block_hasher)


hook = Hooks(
    "block_keys",
    "engine",
)


@hook(
    "vllm.v1.core.kv_cache_utils:get_request_block_hasher",
    name="hasher",
    args=("hash_block_size", "caching_hash_fn"),
    also=("vllm.v1.engine.core:get_request_block_hasher",),
    reads=(
        "vllm.v1.core.kv_cache_utils:init_none_hash",
        "vllm.v1.core.kv_cache_utils:_gen_prompt_embeds_extra_hash_keys",
        "vllm.v1.engine.core:EngineCore.add_request",
        "vllm.utils.hashing:sha256",
        "vllm.utils.hashing:xxhash",
    ),
    why=(
        "keys carry the cumulative image state, in a documented layout that needs no pickle and hashes a long prompt "
        "in a fraction of the time"
    ),
    upstream="none: stock keys are right with right ids, the extension point is missing",
    remove_when="vLLM has a public extension point for the block hasher",
)
def make_block_hasher(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of get_request_block_hasher: our hasher where our layout applies, else the original's."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    function = bound.arguments["caching_hash_fn"]
    name = function.__name__
    if getattr(hashing, name, None) is not function:
        name = "unknown"
    layout_name, why = layout_report(
        name,
        enabled=status.is_on("block_keys"),
        num_lookahead_tokens=bound.arguments.get("num_hash_lookahead_tokens", 0),
    )
    logger.info("mmcache block keys: %s layout (%s)", layout_name, why)
    if layout_name != CUMULATIVE:
        if status.is_on("block_keys"):
            status.put("engine", "block_keys", State("off", why))
        return wrapped(*args, **kwargs)
    hasher = BlockHasher(
        bound.arguments["hash_block_size"],
        _DIGESTS[name],
        lambda: kv_cache_utils.NONE_HASH,
        _prompt_embeds_digest,
    )
    hasher.instead = functools.partial(wrapped, *args, **kwargs)
    return hasher


@hook(
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request",
    name="preempt",
    args=("request",),
    reads=(
        "vllm.v1.core.block_pool:BlockPool.evict_blocks",
        "vllm.v1.core.encoder_cache_manager:EncoderCacheManager.free_encoder_input",
        "vllm.v1.core.encoder_cache_manager:EncoderCacheManager.can_allocate",
    ),
    why="with priorities a request can be preempted in the step that it was scheduled for: nobody computes what the "
    "keys of its blocks promise, and the next request with that prefix would be answered from them; nor the outputs "
    "of its images, without which the engine ends when it comes back",
    upstream="none yet: vLLM leaves the keys of these blocks published, and the outputs booked",
    remove_when="vLLM takes back what is not computed after all",
)
def withdraw_what_is_not_computed(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Scheduler._preempt_request(request, timestamp): what a step promised that it is not part of goes.

    Not guarded: a key that is left would be a wrong answer.
    """
    if not status.is_on("block_keys"):
        return wrapped(*args, **kwargs)
    request, encoder_cache = argument(wrapped, args, kwargs, "request"), instance.encoder_cache_manager
    engine_caches.withdraw_keys(instance.kv_cache_manager, request)
    uncomputed = engine_caches.uncomputed_outputs(encoder_cache, request)
    outcome = wrapped(*args, **kwargs)
    engine_caches.evict_outputs(encoder_cache, uncomputed)
    return outcome


def give_back(engine_core: Any) -> None:
    """Give an engine vLLM's own hasher back, for all its requests, while no block is cached under a key of ours.

    Engine process, main thread. A request that was made before and comes in later is given other keys as it does.
    """
    ours = engine_core.request_block_hasher
    if not isinstance(ours, BlockHasher) or ours.instead is None:
        return
    stock = engine_core.request_block_hasher = ours.instead()

    def rekey(request: Any) -> None:
        if request._block_hasher is ours:
            request._block_hasher = stock
            request.block_hashes.clear()
            request.update_block_hashes()

    for request in engine_core.scheduler.requests.values():
        rekey(request)
    kind, engine = type(engine_core), weakref.ref(engine_core)

    def add_request(request: Any, *args: Any, **kwargs: Any) -> Any:
        rekey(request)
        return kind.add_request(engine(), request, *args, **kwargs)

    engine_core.add_request = add_request


def _prompt_embeds_digest(request: Any, start: int, end: int) -> bytes:
    ((_, embeds_digest),) = kv_cache_utils._gen_prompt_embeds_extra_hash_keys(request, start, end)
    return bytes(embeds_digest)
