# SPDX-License-Identifier: Apache-2.0
"""Calls the core of a GDN layer piece by piece, and keeps the state at each cut. Worker process.

The core is the convolution and the recurrence; projections, attention and the vision tower are computed whole. Between
two pieces the state of the cut request lies in the block that its chunk will end in, and is copied from there into the
checkpoint's; the next piece finds it where the first one left it, and goes on from it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.third_party.flash_linear_attention.ops.index import prepare_chunk_indices, prepare_chunk_offsets
from vllm.third_party.flash_linear_attention.ops.utils import FLA_CHUNK_SIZE
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_mmcache.base.errors import MMCacheError
from vllm_mmcache.components.inner_checkpoints.cuts import Cut, Piece, pieces_of

PartFor = Callable[[Any, Piece], Any]

_KERNELS = frozenset({"triton", "flashinfer"})
"""Backends of GDN's prefill whose metadata is what part_for_kernels makes: FlashInfer reads less of it than FLA."""


class StateNotWritten(MMCacheError):
    """A state that a published block key promises was not written: the engine must not go on."""


class Step:
    """The cuts of the step that a worker computes, from its start to its end."""

    def __init__(self, runner: Any, scheduler_output: Any, cuts: Mapping[str, Sequence[Cut]]) -> None:
        self._runner = runner
        self._scheduler_output = scheduler_output
        self._cuts = cuts
        self._groups = {
            name: number
            for number, group in enumerate(runner.kv_cache_config.kv_cache_groups)
            if isinstance(group.kv_cache_spec, MambaSpec)
            for name in group.layer_names
        }
        self._to_write = set(self._groups)
        self._parts: dict[int, tuple[Any, list[Any]]] = {}  # id of a group's metadata -> it, and that of each piece

    @cached_property
    def pieces(self) -> list[Piece]:
        """The step's pieces. Not before vLLM has put the batch in order."""
        scheduled = self._scheduler_output.num_scheduled_tokens
        order = _order_of(self._runner, self._scheduler_output)
        if sorted(order) != sorted(scheduled):
            raise StateNotWritten("the batch is not that of the step")
        cuts = {order.index(request_id): cuts for request_id, cuts in self._cuts.items()}
        return pieces_of([scheduled[request_id] for request_id in order], cuts)

    def compute(self, layer: Any, metadata: Any, part_for: PartFor, core: Callable[[Any, slice], None]) -> None:
        """Have a layer's core compute the step piece by piece, and keep the state at each cut.

        core is called with the metadata of a piece, which part_for makes, and its tokens.
        """
        for piece, part in zip(self.pieces, self._parts_of(metadata, part_for), strict=True):
            core(part, piece.tokens)
            if piece.cut is not None:
                self._keep(layer, metadata, piece.row, piece.cut)
        self._to_write.remove(layer.prefix)

    def _parts_of(self, metadata: Any, part_for: PartFor) -> list[Any]:
        """The metadata of each piece. Made once per group, since its layers share one."""
        known = self._parts.get(id(metadata))
        if known is None:
            if metadata.num_decode_tokens + metadata.num_prefill_tokens != self.pieces[-1].tokens.stop:
                raise StateNotWritten("the batch is not that of the step")
            known = metadata, [part_for(metadata, piece) for piece in self.pieces]
            self._parts[id(metadata)] = known
        return known[1]

    def _keep(self, layer: Any, metadata: Any, row: int, cut: Cut) -> None:
        """Copy a request's state from its running block into a checkpoint's."""
        target = cut.blocks[self._groups[layer.prefix]]
        running = metadata.non_spec_state_indices_tensor[row : row + 1]
        for state in layer.kv_cache:
            state[target : target + 1] = state.index_select(0, running)

    def end(self) -> None:
        """Raises: StateNotWritten, where a layer has not written its states."""
        if self._to_write:
            raise StateNotWritten(f"{len(self._to_write)} layers kept no state, such as {min(self._to_write)}")


def why_not(worker: Any) -> str:
    """Why a worker's Mamba layers can't keep states inside a chunk; empty where they can."""
    runner, vllm_config = worker.model_runner, worker.vllm_config
    if not hasattr(runner, "gather_batch_req_state") and not hasattr(runner, "input_batch"):
        return f"the order of requests in a batch of {type(runner).__name__} is not known"
    layers = vllm_config.compilation_config.static_forward_context.values()
    for layer in layers:
        if not isinstance(layer, MambaBase):
            continue
        if type(layer) is not QwenGatedDeltaNetAttention:
            return f"layers of the kind {type(layer).__name__} are not known"
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec.mamba_cache_mode != "align":
            return f"Mamba states are kept in the mode {spec.mamba_cache_mode}"
        if spec.num_prefill_checkpoint_blocks or spec.num_speculative_blocks:
            return "vLLM keeps further states of these layers"
        if runner.device.type != "cpu" and layer.gdn_prefill_backend not in _KERNELS:
            return f"GDN's backend {layer.gdn_prefill_backend} is not known"
    return ""


def _order_of(runner: Any, scheduler_output: Any) -> list[str]:
    """The requests of the batch, in its order. Model runner V2 sorts them, as often as it is asked; V1 keeps them."""
    if hasattr(runner, "gather_batch_req_state"):
        return list(runner.gather_batch_req_state(scheduler_output, False)[0].req_ids)
    return list(runner.input_batch.req_ids)


def _rows(metadata: Any, piece: Piece, starts: torch.Tensor) -> dict[str, Any]:
    """What the metadata says of the requests in a piece, as vLLM's builder would for a batch of its tokens.

    starts: where they begin, on the device.
    """
    if metadata.spec_sequence_masks is not None or metadata.checkpoint is not None:
        raise StateNotWritten("a batch with drafts, or with states that vLLM keeps itself")
    if piece.cut is not None and piece.row < metadata.num_decodes:
        raise StateNotWritten("a request with a checkpoint is computed as a decode")
    rows = piece.rows
    decodes = max(0, min(metadata.num_decodes, rows.stop) - rows.start)
    begins = metadata.has_initial_state[rows].clone()
    if piece.goes_on:
        begins[:1] = True
    return {
        "num_decodes": decodes,
        "num_decode_tokens": decodes,
        "num_prefills": rows.stop - rows.start - decodes,
        "num_prefill_tokens": piece.starts[-1] - decodes,
        "num_actual_tokens": piece.starts[-1],
        "has_initial_state": begins,
        "non_spec_query_start_loc": starts,
        "non_spec_state_indices_tensor": metadata.non_spec_state_indices_tensor[rows],
    }


def part_for_cpu(metadata: Any, piece: Piece) -> Any:
    """The metadata of a piece, as far as the core on the CPU reads it."""
    starts = torch.tensor(piece.starts, dtype=metadata.non_spec_query_start_loc.dtype)
    return replace(metadata, **_rows(metadata, piece, starts))


def part_for_kernels(metadata: Any, piece: Piece) -> Any:
    """The metadata of a piece for the convolution's and FLA's kernels in Triton, which also read how they divide it."""
    device = metadata.non_spec_query_start_loc.device
    on_host = torch.tensor(piece.starts, dtype=metadata.non_spec_query_start_loc.dtype)
    starts = async_tensor_h2d(on_host, device=device)
    rows = _rows(metadata, piece, starts)
    decodes = rows["num_decodes"]
    prefills_on_host = on_host[decodes:] - decodes
    nums, batch, offsets = compute_causal_conv1d_metadata(on_host, device=device)
    return replace(
        metadata,
        **rows,
        chunk_indices=async_tensor_h2d(prepare_chunk_indices(prefills_on_host, FLA_CHUNK_SIZE), device=device),
        chunk_offsets=async_tensor_h2d(prepare_chunk_offsets(prefills_on_host, FLA_CHUNK_SIZE), device=device),
        prefill_query_start_loc=starts[decodes:] - decodes,
        prefill_state_indices=rows["non_spec_state_indices_tensor"][decodes:],
        prefill_has_initial_state=rows["has_initial_state"][decodes:],
        nums_dict=nums,
        batch_ptr=batch,
        token_chunk_offset_ptr=offsets,
    )
