# SPDX-License-Identifier: Apache-2.0
"""What a VllmConfig says of the components: which have nothing to do, which can't be, and the settings with it.

Any process, at start.
"""

import os
from typing import Any

from vllm_mmcache.base import status
from vllm_mmcache.base.config_payload import carried
from vllm_mmcache.base.role import Role
from vllm_mmcache.base.status import State
from vllm_mmcache.hooking import installer
from vllm_mmcache.hooking.component import Component

RUST_FRONTEND = "VLLM_USE_RUST_FRONTEND"
"""The variable with which vLLM serves without Python; a frontend is no part of a VllmConfig."""
NO_PYTHON = f"the Rust frontend ({RUST_FRONTEND}) runs no Python"


FIXED_IF_READS = ("vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs", "prev_num_accepted_tokens")
"""Where a vLLM looks accepted tokens up in counts that were taken before its batch's rows moved."""
WAYS_OUT = "--no-async-scheduling, or `patches/apply --only accepted-counts`"


def has_rust_frontend() -> bool:
    """Whether vLLM serves with its Rust frontend, as far as this process's environment says."""
    return os.environ.get(RUST_FRONTEND, "0").strip() not in ("", "0")


def why_absent(role: Role, vllm_config: Any) -> str:
    """Why nothing can be on in this process: what gave it its configuration is without us. Empty where it is not."""
    can_carry = isinstance(vllm_config.additional_config, dict)
    if carried(vllm_config) is not None or not can_carry or role != "worker" or "engine" in status.roles():
        return ""
    return "the engine's process has no mmcache, or MMCACHE_DISABLE is set there"


def state_in(component: Component, vllm_config: Any) -> State | None:
    """Why a component has nothing to do in a configuration, or can't be in it; None where neither is known."""
    if component.images_only and not _takes_images(vllm_config):
        return State("unneeded", "this deployment takes no images")
    if component.hooks.get("engine") and (scheduler := _foreign_scheduler(vllm_config)):
        return State("off", f"the scheduler {scheduler} is not derived from vLLM's")
    return component.state_in(vllm_config)


def _foreign_scheduler(vllm_config: Any) -> str:
    """The name of a scheduler (--scheduler-cls) that only implements vLLM's interface; empty for any other."""
    try:
        scheduler = vllm_config.scheduler_config.get_scheduler_cls()
    except (ImportError, AttributeError, ValueError):
        return ""  # perhaps it is in the engine's process alone; else vLLM says there what is wrong with it
    names = [f"{one.__module__}.{one.__qualname__}" for one in scheduler.__mro__]
    return "" if "vllm.v1.core.sched.scheduler.Scheduler" in names else names[0]


def why_no_trial(vllm_config: Any) -> str:
    """Why an engine with this configuration can't try its components by itself; empty where it can."""
    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    if not _takes_images(vllm_config):
        return "it takes no images"
    if model_config.runner_type != "generate":
        return "it does not generate text"
    if reason := why_not_compared(vllm_config):
        return reason
    if vllm_config.kv_transfer_config is not None or vllm_config.ec_transfer_config is not None:
        return "a connector would take its requests to other engines"
    if parallel.data_parallel_size > 1 and model_config.is_moe:
        return "the data-parallel engines of a mixture of experts wait for each other"
    if parallel.distributed_executor_backend == "external_launcher":
        return "each rank of an external launcher has an engine of its own"
    return ""


def why_not_compared(vllm_config: Any) -> str:
    """Why an engine's cached and uncached answers can't be compared by probability; empty where they can."""
    if vllm_config.model_config.logprobs_mode != "raw_logprobs":
        return f"its log-probabilities are {vllm_config.model_config.logprobs_mode}"
    return "" if vllm_config.cache_config.enable_prefix_caching else "prefix caching is off"


def is_of_an_engine(vllm_config: Any) -> bool:
    """Whether this configuration is a deployment's: vLLM makes some for a part of a model, and some without one."""
    model_config = vllm_config.model_config
    return model_config is not None and not getattr(model_config, "is_submodel_config", False)


def needs_hook(vllm_config: Any, only: str) -> bool:
    """Whether a hook with this `only` (`Hook.only`) is needed; always where it is empty."""
    if only == "runner V1":
        return not vllm_config.use_v2_model_runner
    return not only or vllm_config.parallel_config.pipeline_parallel_size > 1


def wrong_in_vllm(vllm_config: Any) -> str:
    """What vLLM's own code answers wrongly in a configuration; empty where nothing is known.

    Source: vLLM 51571, shown by tests/engine/speculative/test_hybrid_prefix.py; patches/ has a mend.
    """
    # Without prefix caching there are no states at blocks' ends to go on from; V2 counts by request, not by row.
    has_states = vllm_config.model_config.is_hybrid and vllm_config.cache_config.enable_prefix_caching
    is_v1_async = vllm_config.scheduler_config.async_scheduling and not vllm_config.use_v2_model_runner
    if not (has_states and is_v1_async and vllm_config.speculative_config is not None):
        return ""
    if installer.reads_name(*FIXED_IF_READS):
        return ""
    return "a request can go on from another one's Mamba state with speculative decoding (vLLM 51571): wrong answers"


def _takes_images(vllm_config: Any) -> bool:
    mm_config = vllm_config.model_config.multimodal_config
    return mm_config is not None and mm_config.get_limit_per_prompt("image") > 0
