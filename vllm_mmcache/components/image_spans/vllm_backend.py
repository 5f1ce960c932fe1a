# SPDX-License-Identifier: Apache-2.0
"""The CPU attention backend that honours image spans. Worker process; overrides CPU_ATTN through `register_backend`.

Once per step and group of layers, the builder hands vLLM's own builder the step cut into pseudo-sequences
(attention_spans.py); the optimised kernel does the rest. A step without image rows, and a layer in which the model's
images do not attend both ways (rules.py), are left exactly as they are.
"""

from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_mmcache.base import status
from vllm_mmcache.base.errors import CausalImages
from vllm_mmcache.components.image_spans import hooks_worker, rules
from vllm_mmcache.components.image_spans.attention_spans import Piece, cut_step, wider
from vllm_mmcache.models.vllm_registry import images_of


@dataclass
class Wider:
    """Rows of a step that a layer with a sliding window computes again.

    Shapes: rows (num_rows,) int64, of the step. Units: window in tokens.
    """

    window: int
    rows: torch.Tensor
    metadata: CPUAttentionMetadata


@dataclass
class ImageSpanMetadata(CPUAttentionMetadata):
    """A step that is cut at its images."""

    wider: list[Wider] = field(default_factory=list)
    causal_layers: frozenset[str] = frozenset()  # of the same group, where the model's images are causal
    uncut: CPUAttentionMetadata | None = None  # for these


class ImageSpanMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds CPU attention metadata from pseudo-sequences where the step has image rows."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model_config = vllm_config.model_config
        hooks_worker.check_model(model_config)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        told = images_of(model_config) if model_config.is_mm_prefix_lm else None
        images = {
            name: layer
            for name, layer in layers.items()
            if rules.are_bidirectional(told, model_config.hf_config, layer.sliding_window is not None)
        }
        windows = {layer.sliding_window for layer in images.values()} - {None}
        if len(windows) > 1:
            raise CausalImages(
                f"sliding windows of {sorted(windows)} tokens share one group of the KV cache, and images of this "
                "model attend both ways; mmcache serves one window per group"
            )
        self.has_images = bool(images)
        self.causal_layers = frozenset(layers) - frozenset(images)
        self.image_window = windows.pop() if windows else None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """As CPUAttentionMetadataBuilder.build, of a step that is cut where `mm_req_doc_ranges` has image spans.

        Those are (first, last) positions by request, both inclusive (vllm/multimodal/inputs.py:
        PlaceholderRange.extract_embeds_range). Once per step and group of layers.
        """
        step = common_attn_metadata
        spans = step.mm_req_doc_ranges
        off = not status.is_on("image_spans")
        if off or not spans or not self.has_images or self.is_encoder_only_attention or self.is_cross_attention:
            return super().build(common_prefix_len, step, fast_build)
        ends = step.seq_lens.tolist()
        rows = step.query_start_loc.tolist()
        starts = [end - (rows[i + 1] - rows[i]) for i, end in enumerate(ends)]
        pieces = cut_step(starts, ends, spans)
        if pieces is None:
            return super().build(common_prefix_len, step, fast_build)
        cut = super().build(common_prefix_len, rewrite(step, pieces), fast_build)
        metadata = ImageSpanMetadata(**vars(cut))
        if self.image_window is not None:
            for window, again in wider(pieces, self.image_window).items():
                metadata.wider.append(self._wider(step, window, again))
        if self.causal_layers:
            metadata.causal_layers = self.causal_layers
            metadata.uncut = super().build(common_prefix_len, step, fast_build)
        return metadata

    def _wider(self, step: CommonAttentionMetadata, window: int, again: list[tuple[int, Piece]]) -> Wider:
        builder = copy(self)
        builder.window_size = window
        rows = torch.cat([torch.arange(row, row + piece.num_rows) for row, piece in again])
        part = replace(rewrite(step, [piece for _, piece in again]), num_actual_tokens=len(rows))
        return Wider(window, rows, CPUAttentionMetadataBuilder.build(builder, 0, part))


def rewrite(step: CommonAttentionMetadata, pieces: list[Piece]) -> CommonAttentionMetadata:
    """The step as if each piece were a request of its own; slots, and so what is written where, stay as they are.

    Shapes: query_start_loc (pieces + 1,), seq_lens (pieces,), block_table_tensor (pieces, max_blocks), and causal
    (pieces,) int32, on the devices and in the dtypes of the step's own.
    """
    device = step.query_start_loc.device
    num_rows = torch.tensor([0, *(piece.num_rows for piece in pieces)], dtype=torch.int64)
    query_start_loc = num_rows.cumsum(0).to(step.query_start_loc.dtype)
    seq_lens = torch.tensor([piece.seq_len for piece in pieces], dtype=step.seq_lens.dtype, device=device)
    owners = torch.tensor([piece.request for piece in pieces], dtype=torch.int64, device=device)
    return replace(
        step,
        num_reqs=len(pieces),
        query_start_loc=query_start_loc.to(device),
        query_start_loc_cpu=query_start_loc,
        seq_lens=seq_lens,
        max_query_len=max(piece.num_rows for piece in pieces),
        block_table_tensor=step.block_table_tensor[owners].contiguous(),
        # The kernel takes one int32 per sequence: 1 causal, 0 not.
        causal=torch.tensor([piece.causal for piece in pieces], dtype=torch.int32, device=device),
    )


class ImageSpanImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention, with wider windows for some rows."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As vLLM's; then rows whose image ends outside their window are computed again with a wider one.

        Shapes: query (tokens, heads, head_size), key and value (tokens, kv_heads, head_size),
        kv_cache (blocks, kv_heads, block_size, 2 * head_size). Returns `output`, written in place, as query is.
        """
        if not isinstance(attn_metadata, ImageSpanMetadata):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if layer.layer_name in attn_metadata.causal_layers:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata.uncut, output)
        super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        for again in attn_metadata.wider if self.sliding_window > 0 else ():
            kernel = copy(self)
            kernel.sliding_window = again.window
            rows = output[again.rows]
            CPUAttentionBackendImpl.forward(
                kernel, layer, query[again.rows], key, value, kv_cache, again.metadata, rows
            )
            output[again.rows] = rows
        return output


class ImageSpanBackend(CPUAttentionBackend):
    """CPU_ATTN with image spans."""

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """True, where vLLM's own backend for the CPU leaves it at False."""
        return True

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """ImageSpanImpl, in place of CPUAttentionBackendImpl."""
        return ImageSpanImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """ImageSpanMetadataBuilder, in place of CPUAttentionMetadataBuilder."""
        return ImageSpanMetadataBuilder
