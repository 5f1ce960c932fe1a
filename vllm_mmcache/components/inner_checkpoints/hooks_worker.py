# SPDX-License-Identifier: Apache-2.0
"""Cuts the tokens of a step inside the core of GDN layers. Worker process, model runner's thread.

A step that says nothing of checkpoints, which is most of them, passes by. Nothing here is guarded: keys of the states
are published already, so they are written, or the engine ends.
"""

from contextlib import nullcontext
from typing import Any

from vllm.forward_context import get_forward_context

from vllm_mmcache.base import status
from vllm_mmcache.base.arguments import argument, named
from vllm_mmcache.base.failsafe import ends_rank
from vllm_mmcache.base.status import State
from vllm_mmcache.components.inner_checkpoints import vllm_gdn
from vllm_mmcache.components.inner_checkpoints.cuts import CUTS
from vllm_mmcache.hooking.hook import Hooks

_step: vllm_gdn.Step | None = None  # the step that is being computed, where it has checkpoints


hook = Hooks(
    "inner_checkpoints",
    "worker",
    why="a Mamba state exists only where the layer's kernel stops",
    upstream="none yet; 0.33 keeps one state inside a chunk, with FlashInfer's kernel alone",
    remove_when="vLLM keeps Mamba states at any position of a prefill chunk",
)


@hook(
    "vllm.v1.worker.gpu_worker:Worker.execute_model",
    name="step",
    args=("scheduler_output",),
)
def compute_step(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Worker.execute_model(scheduler_output): a step with checkpoints ends with their states written.

    Raises: StateNotWritten; with several ranks SystemExit.
    """
    global _step
    step = argument(wrapped, args, kwargs, "scheduler_output")
    cuts = getattr(step, CUTS, None)
    if cuts is None:
        return wrapped(*args, **kwargs)
    _step = vllm_gdn.Step(instance.model_runner, step, cuts)
    is_alone = instance.parallel_config.world_size == 1
    try:
        with nullcontext() if is_alone else ends_rank("inner_checkpoints"):
            output = wrapped(*args, **kwargs)
            _step.end()
    finally:
        _step = None
    return output


@hook(
    "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:_cpu_gdn_attention_nonspec",
    name="cpu_core",
    args=("layer", "attn_metadata_i", "mixed_qkv", "b", "a", "core_attn_out"),
)
def cut_cpu_core(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Wrapper of _cpu_gdn_attention_nonspec(layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out)."""
    if _step is None:
        wrapped(*args, **kwargs)
        return
    given = named(wrapped, args, kwargs)
    layer, metadata = given.pop("layer"), given.pop("attn_metadata_i")

    def core(part: Any, tokens: slice) -> None:
        wrapped(layer, part, **{name: tensor[tokens] for name, tensor in given.items()})

    _step.compute(layer, metadata, vllm_gdn.part_for_cpu, core)


@hook(
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention._forward_core",
    name="kernel_core",
    args=("mixed_qkv", "b", "a", "core_attn_out"),
)
def cut_kernel_core(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    """Wrapper of QwenGatedDeltaNetAttention._forward_core(mixed_qkv, b, a, core_attn_out).

    It takes its metadata from the forward context, which says of this layer what the piece is, and then what it said.
    """
    if _step is None:
        wrapped(*args, **kwargs)
        return
    given, context = named(wrapped, args, kwargs), get_forward_context()
    whole = context.attn_metadata

    def core(part: Any, tokens: slice) -> None:
        context.attn_metadata = {instance.prefix: part}
        try:
            wrapped(**{name: tensor[tokens] for name, tensor in given.items()})
        finally:
            context.attn_metadata = whole

    _step.compute(instance, whole[instance.prefix], vllm_gdn.part_for_kernels, core)


def look_at(worker: Any) -> None:
    """Say why this worker can't keep states inside a chunk, when its model is loaded."""
    if reason := vllm_gdn.why_not(worker):
        status.put("worker", "inner_checkpoints", State("off", reason))
