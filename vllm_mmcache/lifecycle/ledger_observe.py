# SPDX-License-Identifier: Apache-2.0
"""The ledger's entries of the groups `metrics` and `observe` (left out unless its setting is on). Data only."""

from functools import partial

from vllm_mmcache.hooking.hooks import TESTED_VLLM, Hook

_metric = partial(
    Hook,
    group="metrics",
    vllm=TESTED_VLLM,
    upstream="none: the stat logger plugins receive, but nothing sends",
    remove_when="a plugin can add to SchedulerStats, and its worker's side to ModelRunnerOutput",
)
_tell = partial(
    _metric,
    make="vllm_mmcache.metrics.hooks:tell",
    process="worker",
    args_used=(),
    why="what is counted in the worker is to reach the engine; ModelRunnerOutput has no field for plugins",
)
_stage = partial(
    _metric,
    process="worker",
    only="pipeline stages",
    why="of pipeline stages the first runs the vision tower, and the last one's output alone reaches the engine",
)

METRICS: tuple[Hook, ...] = (
    _metric(
        name="metrics.send",
        target="vllm.v1.core.sched.scheduler:Scheduler.make_stats",
        make="vllm_mmcache.metrics.hooks:send",
        process="engine",
        args_used=(),
        why="what is counted in the engine is to be seen on /metrics; SchedulerStats has no field for plugins",
    ),
    _metric(
        name="metrics.receive",
        target="vllm.v1.metrics.loggers:StatLoggerManager.record",
        make="vllm_mmcache.metrics.hooks:receive",
        process="api",
        args_used=("scheduler_stats",),
        why="stat logger plugins are loaded by the server alone, not by LLM()",
    ),
    _metric(
        name="metrics.hear",
        target="vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        make="vllm_mmcache.metrics.hooks:hear",
        process="engine",
        args_used=("model_runner_output",),
        why="a worker with a process of its own can't be asked",
    ),
    _tell(name="metrics.tell_step", target="vllm.v1.worker.gpu_worker:Worker.execute_model"),
    _tell(name="metrics.tell_sample", target="vllm.v1.worker.gpu_worker:Worker.sample_tokens"),
    _stage(
        name="metrics.hand_on",
        target="vllm.distributed.parallel_state:GroupCoordinator.isend_tensor_dict",
        make="vllm_mmcache.metrics.hooks:hand_on",
        args_used=("tensor_dict",),
    ),
    _stage(
        name="metrics.take_over",
        target="vllm.distributed.parallel_state:GroupCoordinator.irecv_tensor_dict",
        make="vllm_mmcache.metrics.hooks:take_over",
        args_used=(),
    ),
)

_hook = partial(
    Hook,
    group="observe",
    vllm=TESTED_VLLM,
    upstream="43587, 51250, 45238, 31920 ask why; the RFC 43711 went stale",
    remove_when="vLLM says for each request what was not reused and why",
)
_api, _engine = partial(_hook, process="api"), partial(_hook, process="engine")

OBSERVE: tuple[Hook, ...] = (
    _api(
        name="observe.chat",
        target="vllm.renderers.base:BaseRenderer.render_chat",
        make="vllm_mmcache.components.observe.hooks_api:note_chat",
        args_used=("conversations", "chat_params"),
        why="turns that the template writes anew are told from turns that the client changed",
    ),
    _api(
        name="observe.chat_async",
        target="vllm.renderers.base:BaseRenderer.render_chat_async",
        make="vllm_mmcache.components.observe.hooks_api:note_chat_async",
        args_used=("conversations", "chat_params"),
        why="as observe.chat, for the server",
    ),
    _api(
        name="observe.images",
        target="vllm.renderers.base:BaseRenderer._process_multimodal",
        make="vllm_mmcache.components.observe.hooks_api:note_images",
        args_used=("mm_data", "mm_processor_kwargs"),
        why="whether an image was lifted and decoded is known here only",
    ),
    _api(
        name="observe.processor",
        target="vllm.multimodal.processing.processor:BaseMultiModalProcessor._get_cache_missing_items",
        make="vllm_mmcache.components.observe.hooks_api:note_processor",
        args_used=(),
        why="hits of the processor cache are counted, but not by image",
    ),
    _api(
        name="observe.send",
        target="vllm.v1.engine.input_processor:InputProcessor.process_inputs",
        reads=("vllm.renderers:ChatParams",),
        make="vllm_mmcache.components.observe.hooks_api:send_notes",
        args_used=("request_id", "prompt"),
        why="what the API server saw must reach the engine, which compares requests of all API servers",
    ),
    _api(
        name="observe.receive",
        target="vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        make="vllm_mmcache.components.observe.hooks_api:receive",
        args_used=("engine_core_outputs",),
        why="what the engine found must reach the API server that asked",
    ),
    _engine(
        name="observe.lookup",
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        reads=("vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.find_longest_cache_hit_per_group",),
        make="vllm_mmcache.components.observe.hooks_engine:note_lookup",
        args_used=("request",),
        why="what each group had is known at the lookup only",
    ),
    _engine(
        name="observe.outcome",
        target="vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        make="vllm_mmcache.components.observe.hooks_engine:send_outcome",
        args_used=("scheduler_output",),
        why="a request's first output takes along what was found for it",
    ),
    _engine(
        name="observe.evicted",
        target="vllm.v1.core.block_pool:BlockPool._maybe_evict_cached_block",
        make="vllm_mmcache.components.observe.hooks_engine:note_evicted",
        args_used=("block",),
        why="an evicted block is told from one that never was; KV events need a switch and a consumer",
    ),
    _engine(
        name="observe.reset",
        target="vllm.v1.core.block_pool:BlockPool.reset_prefix_cache",
        make="vllm_mmcache.components.observe.hooks_engine:note_reset",
        args_used=(),
        why="a reset of the prefix cache is told from evictions",
    ),
    _engine(
        name="observe.finished",
        target="vllm.v1.core.sched.scheduler:Scheduler._free_request",
        make="vllm_mmcache.components.observe.hooks_engine:note_finished",
        args_used=("request",),
        why="the answer's tokens belong to what a next turn can reuse",
    ),
)
