# SPDX-License-Identifier: Apache-2.0
"""The ledger's entries of the group `observe`, which is left out unless the setting is on. Data only."""

from functools import partial

from vllm_mmcache.upstream.swap import Swap


def observe_entries(vllm: str) -> tuple[Swap, ...]:
    """The entries, for vLLM versions in the range `vllm`."""
    swap = partial(
        Swap,
        group="observe",
        vllm=vllm,
        on_mismatch="off",
        upstream="43587, 51250, 45238, 31920 ask why; the RFC 43711 went stale",
        remove_when="vLLM says for each request what was not reused and why",
    )
    api, engine = partial(swap, process="api"), partial(swap, process="engine")
    return (
        api(
            name="observe.chat",
            target="vllm.renderers.base:BaseRenderer.render_chat",
            make="vllm_mmcache.observe.server:note_chat",
            args_used=("conversations", "chat_params"),
            why="turns that the template writes anew are told from turns that the client changed",
        ),
        api(
            name="observe.chat_async",
            target="vllm.renderers.base:BaseRenderer.render_chat_async",
            make="vllm_mmcache.observe.server:note_chat_async",
            args_used=("conversations", "chat_params"),
            why="as observe.chat, for the server",
        ),
        api(
            name="observe.images",
            target="vllm.renderers.base:BaseRenderer._process_multimodal",
            make="vllm_mmcache.observe.server:note_images",
            args_used=("mm_data", "mm_processor_kwargs"),
            why="whether an image was lifted and decoded is known here only",
        ),
        api(
            name="observe.processor",
            target="vllm.multimodal.processing.processor:BaseMultiModalProcessor._get_cache_missing_items",
            make="vllm_mmcache.observe.server:note_processor",
            args_used=(),
            why="hits of the processor cache are counted, but not by image",
        ),
        api(
            name="observe.send",
            target="vllm.v1.engine.input_processor:InputProcessor.process_inputs",
            reads=("vllm.renderers:ChatParams",),
            make="vllm_mmcache.observe.server:send_notes",
            args_used=("request_id", "prompt"),
            why="what the API server saw must reach the engine, which compares requests of all API servers",
        ),
        api(
            name="observe.receive",
            target="vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
            make="vllm_mmcache.observe.server:receive",
            args_used=("engine_core_outputs",),
            why="what the engine found must reach the API server that asked",
        ),
        engine(
            name="observe.lookup",
            target="vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
            reads=("vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.find_longest_cache_hit_per_group",),
            make="vllm_mmcache.observe.engine:note_lookup",
            args_used=("request",),
            why="what each group had is known at the lookup only",
        ),
        engine(
            name="observe.evicted",
            target="vllm.v1.core.block_pool:BlockPool._maybe_evict_cached_block",
            make="vllm_mmcache.observe.engine:note_evicted",
            args_used=("block",),
            why="an evicted block is told from one that never was; KV events need a switch and a consumer",
        ),
        engine(
            name="observe.reset",
            target="vllm.v1.core.block_pool:BlockPool.reset_prefix_cache",
            make="vllm_mmcache.observe.engine:note_reset",
            args_used=(),
            why="a reset of the prefix cache is told from evictions",
        ),
        engine(
            name="observe.finished",
            target="vllm.v1.core.sched.scheduler:Scheduler._free_request",
            make="vllm_mmcache.observe.engine:note_finished",
            args_used=("request",),
            why="the answer's tokens belong to what a next turn can reuse",
        ),
        engine(
            name="observe.outcome",
            target="vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
            make="vllm_mmcache.observe.engine:send_outcome",
            args_used=("scheduler_output",),
            why="trace headers of a first output are a way to the API server that works between machines",
        ),
    )
