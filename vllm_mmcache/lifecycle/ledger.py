# SPDX-License-Identifier: Apache-2.0
"""Every vLLM symbol that mmcache replaces. Data only: start, doctor, docs, checks and tests read this one tuple.

A vLLM that a group does not fit runs without it, and is then as wrong or right there as it is without us.
"""

from functools import partial

from vllm_mmcache.base.status import Role
from vllm_mmcache.hooking.hooks import TESTED_VLLM, Hook
from vllm_mmcache.lifecycle.ledger_bodies import BODIES
from vllm_mmcache.lifecycle.ledger_features import FEATURES
from vllm_mmcache.lifecycle.ledger_identity import IDENTITY
from vllm_mmcache.lifecycle.ledger_observe import METRICS, OBSERVE
from vllm_mmcache.lifecycle.ledger_report import REPORT

_hook = partial(Hook, vllm=TESTED_VLLM)

_SETTINGS_WHY = (
    "a general plugin gets no configuration; the `mmcache` part of --additional-config must be checked and put in "
    "force in each process before a room reads a setting"
)
_SETTINGS_UPSTREAM = "none: no public hook hands VllmConfig to a general plugin"
_SETTINGS_REMOVE = "general plugins are handed the VllmConfig"

_ENDLESS_UPSTREAM = "none yet; encoder_budget compares the longest item of the model with max_num_batched_tokens alone"
_ENDLESS_REMOVE = "vLLM refuses what a step can't hold, by each of its limits"

_RESUMED_WHY = "a preempted request that comes back with a shorter prefix hit finds no image inputs; the engine dies"
_RESUMED_UPSTREAM = "none yet; reproduced on 0.32 under random load with a small KV cache"
_RESUMED_REMOVE = (
    "vLLM's model runner V1 is gone: V2 (0.32, 0.33) is sent a resumed request as a new one, images included"
)

_VIDEO_WHY = "every video of a conversation is decoded on every turn, also when all its tokens are cached"

LEDGER: tuple[Hook, ...] = (
    _hook(
        name="settings.api",
        group="settings",
        target="vllm.config.vllm:VllmConfig.__post_init__",
        make="vllm_mmcache.lifecycle.hooks:read_after_config",
        process="api",
        args_used=(),
        why=_SETTINGS_WHY,
        upstream=_SETTINGS_UPSTREAM,
        remove_when=_SETTINGS_REMOVE,
    ),
    _hook(
        name="settings.engine",
        group="settings",
        target="vllm.v1.executor.abstract:Executor.__init__",
        make="vllm_mmcache.lifecycle.hooks:build_executor",
        process="engine",
        args_used=("vllm_config",),
        why=_SETTINGS_WHY,
        upstream=_SETTINGS_UPSTREAM,
        remove_when=_SETTINGS_REMOVE,
    ),
    _hook(
        name="settings.worker",
        group="settings",
        target="vllm.v1.worker.worker_base:WorkerBase.__init__",
        make="vllm_mmcache.lifecycle.hooks:build_worker",
        process="worker",
        args_used=("vllm_config",),
        why=_SETTINGS_WHY,
        upstream=_SETTINGS_UPSTREAM,
        remove_when=_SETTINGS_REMOVE,
    ),
    *REPORT,
    _hook(
        name="block_keys.hasher",
        group="block_keys",
        target="vllm.v1.core.kv_cache_utils:get_request_block_hasher",
        also=("vllm.v1.engine.core:get_request_block_hasher",),
        reads=(
            "vllm.v1.core.kv_cache_utils:init_none_hash",
            "vllm.v1.core.kv_cache_utils:_gen_prompt_embeds_extra_hash_keys",
            "vllm.utils.hashing:sha256",
            "vllm.utils.hashing:xxhash",
        ),
        make="vllm_mmcache.components.block_keys.hooks:make_block_hasher",
        process="engine",
        args_used=("hash_block_size", "caching_hash_fn"),
        why=(
            "keys carry the cumulative image state, in a documented layout that needs no pickle and hashes a long "
            "prompt in a fraction of the time"
        ),
        upstream="none: stock keys are right with right ids, the extension point is missing",
        remove_when="vLLM has a public extension point for the block hasher",
    ),
    _hook(
        name="image_spans.atomic",
        group="image_spans",
        target="vllm.v1.core.sched.scheduler:Scheduler._try_schedule_encoder_inputs",
        make="vllm_mmcache.components.image_spans.hooks_engine:make_atomic",
        process="engine",
        args_used=("request", "num_computed_tokens", "num_new_tokens"),
        why="a chunk that ends inside a bidirectional image gives wrong KV, cached under the right key",
        upstream="52306; 0.33 covers a chunk that starts on the image, not a prefix hit inside it",
        remove_when="vLLM never splits such a span",
    ),
    _hook(
        name="image_spans.free",
        group="image_spans",
        target="vllm.v1.core.sched.scheduler:Scheduler._free_encoder_inputs",
        make="vllm_mmcache.components.image_spans.hooks_engine:free_after_last_embedding",
        process="engine",
        args_used=("request",),
        why="adjacent images whose ranges overlap wait for each other for ever in a small encoder cache",
        upstream="none yet",
        remove_when="vLLM frees an encoder output after its last embedding",
    ),
    _hook(
        name="image_spans.window",
        group="image_spans",
        target="vllm.v1.core.sched.scheduler:get_mm_features_in_window",
        make="vllm_mmcache.components.image_spans.hooks_engine:skip_computed_images",
        process="engine",
        args_used=("mm_features", "start", "end"),
        why="the scheduler asks again for an image of which only trailing text is left",
        upstream="none yet",
        remove_when="vLLM leaves out images whose embeddings are all computed",
    ),
    _hook(
        name="image_spans.refuse",
        group="image_spans",
        target="vllm.v1.engine.input_processor:InputProcessor._validate_model_inputs",
        reads=("vllm.multimodal.utils:argsort_mm_positions",),
        make="vllm_mmcache.components.image_spans.hooks_api:refuse_request",
        process="api",
        args_used=("decoder_input",),
        why="a span longer than a step waits for ever, in 0.32 with everyone behind it",
        upstream=_ENDLESS_UPSTREAM,
        remove_when=_ENDLESS_REMOVE,
    ),
    _hook(
        name="image_spans.refuse_stream",
        group="image_spans",
        target="vllm.v1.engine.async_llm:AsyncLLM.generate",
        make="vllm_mmcache.components.image_spans.hooks_api:refuse_before_stream",
        process="api",
        args_used=("prompt",),
        why="what is raised there reaches a client that streams after the status 200",
        upstream="none yet",
        remove_when="vLLM makes the engine's request before it begins to stream",
    ),
    _hook(
        name="image_spans.turns",
        group="image_spans",
        target="vllm.v1.core.sched.scheduler:Scheduler.schedule",
        make="vllm_mmcache.components.image_spans.hooks_engine:take_turns",
        process="engine",
        args_used=("throttle_prefills",),
        why="running requests leave a long span no room; 0.32 holds up all behind it, 0.33 lets newer ones pass it",
        upstream="none yet",
        remove_when="vLLM reserves room for an input that must not be split",
    ),
    _hook(
        name="image_spans.guard",
        group="image_spans",
        target="vllm.model_executor.layers.attention.attention:Attention.__init__",
        make="vllm_mmcache.components.image_spans.hooks_worker:demand_image_spans",
        process="worker",
        args_used=(),
        why="a backend that runs images causally is silently wrong",
        upstream="none: the CPU platform ignores use_mm_prefix",
        remove_when="every platform refuses such a backend",
    ),
    _hook(
        name="resumed_images.send",
        group="resumed_images",
        target="vllm.v1.core.sched.scheduler:Scheduler._make_cached_request_data",
        make="vllm_mmcache.components.resumed_images.hooks:send_images",
        process="engine",
        args_used=("resumed_reqs",),
        reads=("vllm.multimodal.utils:strip_covered_mm_data",),
        why=_RESUMED_WHY,
        upstream=_RESUMED_UPSTREAM,
        remove_when=_RESUMED_REMOVE,
    ),
    _hook(
        name="resumed_images.receive",
        group="resumed_images",
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
        make="vllm_mmcache.components.resumed_images.hooks:receive_images",
        process="worker",
        args_used=("scheduler_output",),
        why=_RESUMED_WHY,
        upstream=_RESUMED_UPSTREAM,
        remove_when=_RESUMED_REMOVE,
    ),
    _hook(
        name="image_checkpoints.plan",
        group="image_checkpoints",
        target="vllm.v1.core.sched.scheduler:Scheduler._get_local_prefix_cache_hit",
        make="vllm_mmcache.components.image_checkpoints.hooks:plan_checkpoints",
        process="engine",
        args_used=("request",),
        why="sparse retention keeps a state at the prompt's end alone: the second question about an image misses",
        upstream="43587, 51250, 45238, 48435; 56818 proposes a stop at the last image's end for Mamba",
        remove_when="vLLM keeps the states at image boundaries",
    ),
    _hook(
        name="image_checkpoints.split",
        group="image_checkpoints",
        target="vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split",
        make="vllm_mmcache.components.image_checkpoints.hooks:stop_at_checkpoints",
        process="engine",
        args_used=("request", "num_new_tokens", "num_new_local_computed_tokens", "num_external_computed_tokens"),
        why="a Mamba state exists only where a prefill chunk ends",
        upstream="56818",
        remove_when="vLLM keeps the states at image boundaries",
    ),
    _hook(
        name="image_checkpoints.keep",
        group="image_checkpoints",
        target="vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.cache_blocks",
        make="vllm_mmcache.components.image_checkpoints.hooks:keep_checkpoints",
        process="engine",
        args_used=("request", "replay_boundaries"),
        why="the blocks at image boundaries are to be found by later requests",
        upstream="56818",
        remove_when="vLLM keeps the states at image boundaries",
    ),
    *FEATURES,
    *METRICS,
    _hook(
        name="lazy_media.text",
        group="lazy_media",
        target="vllm.multimodal.media.image:ImageMediaIO.load_base64",
        make="vllm_mmcache.components.lazy_media.hooks:load_base64",
        process="api",
        args_used=("data",),
        why="every image of a conversation is decoded from base64 and hashed on every turn",
        upstream="57752 (lazy media, an experiment)",
        remove_when="vLLM keeps known images undecoded",
    ),
    _hook(
        name="lazy_media.content",
        group="lazy_media",
        target="vllm.multimodal.media.image:ImageMediaIO.load_bytes",
        reads=("vllm.multimodal.media:MediaWithBytes",),
        make="vllm_mmcache.components.lazy_media.hooks:load_bytes",
        process="api",
        args_used=("data",),
        why="every image of a conversation is decoded on every turn, also when all its tokens are cached",
        upstream="57752 (lazy media, an experiment)",
        remove_when="vLLM keeps known images undecoded",
    ),
    _hook(
        name="lazy_media.mm_hash",
        group="lazy_media",
        target="vllm.multimodal.hasher:MultiModalHasher.hash_kwargs",
        make="vllm_mmcache.components.lazy_media.hooks:remember_mm_hash",
        process="api",
        args_used=("algorithm",),
        why="the hash of known bytes is computed anew for every image on every turn",
        upstream="none yet",
        remove_when="vLLM remembers the hash of known bytes",
    ),
    _hook(
        name="lazy_media.video_text",
        group="lazy_media",
        target="vllm.multimodal.media.video:VideoMediaIO.load_base64",
        make="vllm_mmcache.components.lazy_media.video.hooks:load_base64",
        process="api",
        args_used=("media_type", "data"),
        why=_VIDEO_WHY,
        upstream="57752 (lazy media, an experiment)",
        remove_when="vLLM keeps known videos undecoded",
    ),
    _hook(
        name="lazy_media.video_content",
        group="lazy_media",
        target="vllm.multimodal.media.video:VideoMediaIO.load_bytes",
        make="vllm_mmcache.components.lazy_media.video.hooks:load_bytes",
        process="api",
        args_used=("data",),
        why=_VIDEO_WHY,
        upstream="57752 (lazy media, an experiment)",
        remove_when="vLLM keeps known videos undecoded",
    ),
    _hook(
        name="lazy_media.video_parts",
        group="lazy_media",
        target="vllm.multimodal.parse:MultiModalDataParser._get_video_with_metadata",
        make="vllm_mmcache.components.lazy_media.video.hooks:keep_undecoded",
        process="api",
        args_used=("video",),
        why="it takes frames and metadata apart, for which an undecoded video would be decoded",
        upstream="none yet",
        remove_when="vLLM keeps known videos undecoded",
    ),
    _hook(
        name="lazy_media.video_names",
        group="lazy_media",
        target="vllm.renderers.base:BaseRenderer._validate_mm_uuids",
        make="vllm_mmcache.components.lazy_media.video.hooks:look_at_none",
        process="api",
        args_used=("mm_data", "mm_data_items", "mm_uuid_items"),
        why="it looks at each item to see whether it is None, for which an undecoded video would be decoded",
        upstream="none yet",
        remove_when="vLLM keeps known videos undecoded",
    ),
    *BODIES,
    *IDENTITY,
    _hook(
        name="pixels.renderer",
        group="pixels",
        target="vllm.renderers.base:BaseRenderer.__init__",
        reads=(
            "vllm.renderers.base:BaseRenderer._process_multimodal",
            "vllm.multimodal.processing.processor:BaseMultiModalProcessor._cached_apply_hf_processor",
            "vllm.multimodal.processing.processor:BaseMultiModalProcessor._get_mm_hashes",
        ),
        make="vllm_mmcache.components.lazy_processing.hooks:build_renderer",
        process="api",
        args_used=(),
        why="one thread processes all images, known ones too when they have left vLLM's processor cache",
        upstream="55583, 57752 (both open)",
        remove_when="vLLM makes pixels where its encoder needs them, and processes images side by side",
    ),
    *OBSERVE,
)


FIRST = "settings"
"""The group that sees the VllmConfig: installed when the plugin is registered. All else follows when it is seen."""
ALWAYS = "report"
"""The group that tells what is in force; it is no room, and on wherever another is."""

# Rooms that are off unless their setting is true.
OPT_IN = frozenset({"observe"})

# A group steps aside where vLLM has all of these symbols, and so does the same by itself; as with our own patches/.
OVERTAKEN_BY: dict[str, tuple[str, ...]] = {
    "image_spans": (
        "vllm.v1.core.sched.scheduler:Scheduler._clip_to_whole_mm_spans",
        "vllm.v1.attention.backends.cpu_attn:split_at_mm_prefix",
    ),
    "lazy_media": ("vllm.multimodal.media.image:ImageMediaIO.load_bytes_lazy",),
}

# A group steps aside where the body of this symbol reads a name with this in it, and so does the same by itself. (The
# proposal 56818 has the last multimodal feature's end on the request, under a name that isn't settled.)
OVERTAKEN_WHERE: dict[str, tuple[str, str]] = {
    "resumed_images": ("vllm.v1.core.sched.scheduler:Scheduler._make_cached_request_data", "mm_features"),
    "image_checkpoints": ("vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split", "mm_"),
}

# A group can't work without another.
NEEDS: dict[str, str] = {"lifted_bodies": "lazy_media", "pixels": "lazy_media", "observe": "metrics"}


def groups() -> dict[str, list[Hook]]:
    """The ledger by group, in ledger order."""
    by_group: dict[str, list[Hook]] = {}
    for hook in LEDGER:
        by_group.setdefault(hook.group, []).append(hook)
    return by_group


ROOMS = tuple(group for group in groups() if group not in (FIRST, ALWAYS))


def parts(role: Role) -> dict[str, list[Hook]]:
    """The rooms with a part in a role, and that part, in ledger order."""
    found = {group: [hook for hook in members if hook.process == role] for group, members in groups().items()}
    return {room: found[room] for room in ROOMS if found[room]}
