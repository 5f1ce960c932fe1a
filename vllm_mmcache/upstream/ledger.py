# SPDX-License-Identifier: Apache-2.0
"""Every vLLM symbol that mmcache replaces. Data only: start, doctor, docs, checks and tests read this one tuple."""

from vllm_mmcache.upstream.swap import Swap

TESTED_VLLM = ">=0.32.0,<0.34"

_SETTINGS_WHY = (
    "a general plugin gets no configuration; the `mmcache` part of --additional-config must be checked and put in "
    "force in each process before a room reads a setting"
)
_SETTINGS_UPSTREAM = "none: no public hook hands VllmConfig to a general plugin"
_SETTINGS_REMOVE = "general plugins are handed the VllmConfig"

LEDGER: tuple[Swap, ...] = (
    Swap(
        name="settings.api",
        group="settings",
        target="vllm.config.vllm:VllmConfig.__post_init__",
        make="vllm_mmcache.upstream.settings_side:read_after_config",
        vllm=TESTED_VLLM,
        process="api",
        args_used=(),
        on_mismatch="off",
        why=_SETTINGS_WHY,
        upstream=_SETTINGS_UPSTREAM,
        remove_when=_SETTINGS_REMOVE,
    ),
    Swap(
        name="settings.engine",
        group="settings",
        target="vllm.v1.executor.abstract:Executor.__init__",
        make="vllm_mmcache.upstream.settings_side:read_before_init",
        vllm=TESTED_VLLM,
        process="engine",
        args_used=("vllm_config",),
        on_mismatch="off",
        why=_SETTINGS_WHY,
        upstream=_SETTINGS_UPSTREAM,
        remove_when=_SETTINGS_REMOVE,
    ),
    Swap(
        name="settings.worker",
        group="settings",
        target="vllm.v1.worker.worker_base:WorkerBase.__init__",
        make="vllm_mmcache.upstream.settings_side:read_before_init",
        vllm=TESTED_VLLM,
        process="worker",
        args_used=("vllm_config",),
        on_mismatch="off",
        why=_SETTINGS_WHY,
        upstream=_SETTINGS_UPSTREAM,
        remove_when=_SETTINGS_REMOVE,
    ),
    Swap(
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
        make="vllm_mmcache.block_keys.vllm_side:make_block_hasher",
        vllm=TESTED_VLLM,
        process="engine",
        args_used=("hash_block_size", "caching_hash_fn"),
        on_mismatch="off",
        why=(
            "keys carry the cumulative image state, in a documented layout that needs no pickle and hashes a long "
            "prompt in a fraction of the time"
        ),
        upstream="none: stock keys are right with right ids, the seam is missing",
        remove_when="vLLM has a public seam for the block hasher",
    ),
)


def groups() -> dict[str, list[Swap]]:
    """The ledger by group, in ledger order."""
    by_group: dict[str, list[Swap]] = {}
    for swap in LEDGER:
        by_group.setdefault(swap.group, []).append(swap)
    return by_group
