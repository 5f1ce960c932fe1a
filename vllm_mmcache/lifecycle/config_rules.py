# SPDX-License-Identifier: Apache-2.0
"""What a VllmConfig says of the rooms: which have nothing to do, which can't be, and the settings that travel with it.

Any process, at start.
"""

import os
from collections.abc import Callable
from typing import Any

from vllm_mmcache.base import settings, status
from vllm_mmcache.base.config_payload import carried
from vllm_mmcache.base.status import Role, State
from vllm_mmcache.hooking import hooks

RUST_FRONTEND = "VLLM_USE_RUST_FRONTEND"
"""The variable with which vLLM serves without Python; a frontend is no part of a VllmConfig."""
NO_PYTHON = f"the Rust frontend ({RUST_FRONTEND}) runs no Python"


_NOT_CACHED = "prefix caching is off"
MENDED_WHERE = ("vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs", "prev_num_accepted_tokens")
"""Where a vLLM looks accepted tokens up in counts that were taken before its batch's rows moved."""
WAYS_OUT = "--no-async-scheduling, or `patches/apply --only accepted-counts`"
# With which checkpoints were shown to be right, by whether it is model runner V2. There ngram is a kernel that Triton's
# interpreter can't run.
_DRAFTERS = {False: frozenset({"ngram", "eagle"}), True: frozenset({"eagle"})}


def has_rust_frontend() -> bool:
    """Whether vLLM serves with its Rust frontend, as far as this process's environment says."""
    return os.environ.get(RUST_FRONTEND, "0").strip() not in ("", "0")


def why_absent(role: Role, vllm_config: Any) -> str:
    """Why nothing can be on in this process: what gave it its configuration is without us. Empty where it is not."""
    can_carry = isinstance(vllm_config.additional_config, dict)
    if carried(vllm_config) is not None or not can_carry or role != "worker" or "engine" in status.roles():
        return ""
    return "the engine's process has no mmcache, or MMCACHE_DISABLE is set there"


def state_in(room: str, vllm_config: Any) -> State | None:
    """Why a room has nothing to do in a configuration, or can't be in it; None where neither is known."""
    if room in OF_IMAGES and not _takes_images(vllm_config):
        return State("unneeded", "this deployment takes no images")
    rule = _RULES.get(room)
    return rule(vllm_config) if rule is not None else None


def is_of_an_engine(vllm_config: Any) -> bool:
    """Whether this configuration is a deployment's: vLLM makes some for a part of a model, and some without one."""
    model_config = vllm_config.model_config
    return model_config is not None and not getattr(model_config, "is_submodel_config", False)


def has(vllm_config: Any, only: str) -> bool:
    """Whether a configuration has what a hook is only for (`Hook.only`); always for one that is for all."""
    if only == "runner V1":
        return not vllm_config.use_v2_model_runner
    return not only or vllm_config.parallel_config.pipeline_parallel_size > 1


def wrong_in_vllm(vllm_config: Any) -> str:
    """What vLLM's own code answers wrongly in a configuration; empty where nothing is known.

    Source: vLLM 51571, shown by tests/speculative/test_hybrid_prefix.py; patches/ has a mend.
    """
    # Without prefix caching there are no states at blocks' ends to go on from; V2 counts by request, not by row.
    has_states = vllm_config.model_config.is_hybrid and vllm_config.cache_config.enable_prefix_caching
    is_v1_async = vllm_config.scheduler_config.async_scheduling and not vllm_config.use_v2_model_runner
    if not (has_states and is_v1_async and vllm_config.speculative_config is not None):
        return ""
    if hooks.reads_name(*MENDED_WHERE):
        return ""
    return "a request can go on from another one's Mamba state with speculative decoding (vLLM 51571): wrong answers"


def _takes_images(vllm_config: Any) -> bool:
    mm_config = vllm_config.model_config.multimodal_config
    return mm_config is not None and mm_config.get_limit_per_prompt("image") > 0


def _block_keys(vllm_config: Any) -> State | None:
    return None if vllm_config.cache_config.enable_prefix_caching else State("unneeded", _NOT_CACHED)


def _image_spans(vllm_config: Any) -> State | None:
    if vllm_config.model_config.is_mm_prefix_lm:
        return None
    return State("unneeded", "an image of this model sees what came before it, as text does")


def _resumed_images(vllm_config: Any) -> State | None:
    if vllm_config.use_v2_model_runner:
        return State("unneeded", "model runner V2 is sent a resumed request as a new one, images included")
    return None


def _image_checkpoints(vllm_config: Any) -> State | None:
    parallel = vllm_config.parallel_config
    if not vllm_config.cache_config.enable_prefix_caching:
        return State("unneeded", _NOT_CACHED)
    speculative, transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
    is_hybrid = vllm_config.model_config.is_hybrid
    if speculative is not None:
        if is_hybrid:
            why = "wrong prefix hits of Mamba states are reported with speculative decoding (vLLM 53912)"
            return State("off", why)
        if speculative.method not in _DRAFTERS[vllm_config.use_v2_model_runner]:
            where = " on model runner V2" if vllm_config.use_v2_model_runner else ""
            return State("off", f"not shown to be right with speculative decoding by {speculative.method}{where}")
    if transfer is not None:
        if is_hybrid:
            return State("off", "with a KV connector, vLLM uses a Mamba state before the load that brings it")
        if speculative is not None:
            return State("off", "not shown to be right with a KV connector and speculative decoding together")
        if vllm_config.use_v2_model_runner or vllm_config.scheduler_config.async_scheduling:
            why = "with a KV connector, not shown to be right on model runner V2 or with async scheduling"
            return State("off", why)
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return State("off", "not shown to be right with context parallelism")
    return None


def _features(vllm_config: Any) -> State | None:
    mm_config = vllm_config.model_config.multimodal_config
    if not vllm_config.cache_config.enable_prefix_caching:
        return State("off", _NOT_CACHED)
    if vllm_config.ec_transfer_config is not None:
        return State("off", "ec_transfer_config is set, and wins")
    if vllm_config.parallel_config.prefill_context_parallel_size > 1:
        return State("off", "not written for context parallelism in prefill")
    if mm_config.mm_processor_cache_type == "shm" and settings.current().identity is False:
        why = "with mm_processor_cache_type=shm the engine can't see what an image shows, and identity, which says it"
        return State("off", f"{why}, is switched off")
    if vllm_config.lora_config is not None and vllm_config.lora_config.enable_tower_connector_lora:
        return State("off", "LoRA adapters can change the vision tower")
    if mm_config.is_multimodal_pruning_enabled():
        return State("off", "features are pruned")
    if mm_config.mm_encoder_attn_dtype == "fp8" and mm_config.mm_encoder_fp8_scale_path is None:
        why = "the tower's fp8 scales follow what it has seen (mm_encoder_fp8_scale_path gives fixed ones)"
        return State("off", why)
    return None


def _pixels(vllm_config: Any) -> State | None:
    device = vllm_config.model_config.multimodal_config.get_mm_processor_device_type()
    return State("off", f"images are processed on {device}") if device not in (None, "cpu") else None


def _identity(vllm_config: Any) -> State | None:
    is_multimodal = vllm_config.model_config.multimodal_config is not None
    return None if is_multimodal else State("unneeded", "this model takes text alone")


OF_IMAGES = frozenset({"resumed_images", "image_checkpoints", "features", "lazy_media", "lifted_bodies", "pixels"})
"""Rooms that have nothing to do where no images are taken."""

_RULES: dict[str, Callable[[Any], State | None]] = {
    "block_keys": _block_keys,
    "image_spans": _image_spans,
    "resumed_images": _resumed_images,
    "image_checkpoints": _image_checkpoints,
    "features": _features,
    "identity": _identity,
    "pixels": _pixels,
}
