# SPDX-License-Identifier: Apache-2.0
"""Lays the naive attention beside the attention layers of a model that runs. Worker process.

The running backend computes a step and writes K and V into the cache; then the naive form reads the cache. Where vLLM
replays a whole CUDA graph, no Python runs in a step, and nothing is seen of it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

from vllm_mmcache.models.protocol import ImageModel
from vllm_mmcache.models.vllm_registry import images_of
from vllm_mmcache.reference_attention.naive import Span, allowed_at, attend, gather_pages

MOST_SCORES = 1 << 22
"""Rows times keys that are computed at once, for each head: long sequences are computed a few rows at a time."""

_STEP = "_mmcache_step"
"""On the metadata of a step: the CommonAttentionMetadata that it was built from."""


class CannotCompute(Exception):
    """Why the naive form can't compute a layer, in words."""


@dataclass(frozen=True)
class Request:
    """What a step computes of one request, in one layer.

    first_row: of the step's rows. start, end: positions [start, end) of its rows in the sequence. spans: its images.
    """

    first_row: int
    start: int
    end: int
    spans: tuple[Span, ...]
    block_table: torch.Tensor  # (max_blocks,) int32


@dataclass(frozen=True)
class LayerStep:
    """A step of one attention layer, after the backend has computed it.

    Shapes: query and output (rows, num_heads, head_size); kv_cache as the backend keeps it.
    """

    layer: Any
    query: torch.Tensor
    kv_cache: torch.Tensor
    output: torch.Tensor
    requests: tuple[Request, ...]


class ReferenceLayers:
    """The attention layers of a model runner's model, and the naive form of each.

    spans: of the images of the request that runs alone, if it is known; else what vLLM says of each step.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._config = runner.vllm_config
        model_config = runner.vllm_config.model_config
        self._hf_config = model_config.hf_config
        self._images: ImageModel | None = images_of(model_config) if model_config.is_mm_prefix_lm else None
        self._has_both_ways = bool(model_config.is_mm_prefix_lm)
        self.spans: tuple[Span, ...] | None = None
        self._put: list[tuple[Any, str, Any]] = []

    def watch(self, computed: Callable[[LayerStep], None]) -> None:
        """From now on, `computed` is called after each layer of each step; until `leave`."""
        for group in self._groups():
            for builder in group.metadata_builders:
                self._note_steps(builder)
        for layer in self._layers():
            self._note_layer(layer, computed)

    def leave(self) -> None:
        """Layers are as they were."""
        while self._put:
            owner, name, before = self._put.pop()
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def why_unusable(self) -> str:
        """Why the steps of this model can't be computed naively; empty if they can."""
        mode = self._config.compilation_config.cudagraph_mode
        if mode is not None and mode.has_full_cudagraphs():
            return (
                f"cudagraph_mode is {mode.name}, which runs whole steps in a graph: choose PIECEWISE or --enforce-eager"
            )
        reasons = ((layer.layer_name, self._why_not(layer)) for layer in self._layers())
        return next((f"layer {name}: {reason}" for name, reason in reasons if reason), "")

    def rows(self, step: LayerStep, request: Request, positions: Sequence[int]) -> torch.Tensor:
        """What the naive form gives for rows of a request at these positions. Raises: CannotCompute.

        Shapes: returns (len(positions), num_heads, head_size) in the query's dtype.
        """
        layer, impl = step.layer, step.layer.impl
        if reason := self._why_not(layer):
            raise CannotCompute(reason)
        if step.output.dtype != step.query.dtype:  # a kernel that quantizes what it gives, with a scale of its own
            raise CannotCompute(f"its output is {step.output.dtype}")
        keys, values, key_order, value_order = _pages(layer, step.kv_cache)
        at = torch.tensor(positions, dtype=torch.int64, device=step.query.device)
        mask = allowed_at(at, request.end, self._spans_in(layer, request), layer.sliding_window or 0)
        return attend(
            step.query[at - request.start + request.first_row],
            gather_pages(keys, request.block_table, request.end, key_order),
            gather_pages(values, request.block_table, request.end, value_order),
            mask,
            impl.scale,
            float(getattr(impl, "logits_soft_cap", None) or 0),
        )

    def _groups(self) -> Iterator[Any]:
        for groups in self._runner.attn_groups:
            yield from groups

    def _layers(self) -> Iterator[Any]:
        for group in self._groups():
            layers = get_layers_from_vllm_config(self._config, Attention, group.layer_names)
            yield from (layer for layer in layers.values() if layer.attn_type == "decoder")

    def _why_not(self, layer: Any) -> str:
        impl = layer.impl
        if type(layer) is not Attention:  # a subclass may mask otherwise, as ChunkedLocalAttention does
            return f"it is a {type(layer).__name__}"
        if (ranks := getattr(impl, "dcp_world_size", 1)) > 1:
            return f"each of {ranks} ranks has a part of its KV cache"
        if getattr(impl, "sinks", None) is not None:
            return "it has attention sinks"
        if getattr(impl, "alibi_slopes", None) is not None:
            return "it has ALiBi"
        if str(layer.kv_cache_dtype) not in ("auto", str(layer.dtype).removeprefix("torch.")):
            return f"its KV cache is {layer.kv_cache_dtype}"
        if self._has_both_ways and self._images is None:
            return "the class of the model does not say where images attend both ways"
        return ""

    def _spans_in(self, layer: Any, request: Request) -> tuple[Span, ...]:
        if self._images is None:
            return ()
        attention = self._images.attention(self._hf_config)
        return request.spans if attention.goes_both_ways(layer.sliding_window is not None) else ()

    def _note_steps(self, builder: Any) -> None:
        build, update = builder.build, builder.update_block_table

        def build_and_note(common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            metadata = build(common_prefix_len, common_attn_metadata, *args, **kwargs)
            setattr(metadata, _STEP, (common_attn_metadata, common_attn_metadata.block_table_tensor))
            return metadata

        def update_and_note(metadata: Any, block_table: torch.Tensor, slot_mapping: torch.Tensor) -> Any:
            updated = update(metadata, block_table, slot_mapping)
            if (noted := getattr(metadata, _STEP, None)) is not None:
                setattr(updated, _STEP, (noted[0], block_table))
            return updated

        self._replace(builder, "build", build_and_note)
        self._replace(builder, "update_block_table", update_and_note)

    def _note_layer(self, layer: Any, computed: Callable[[LayerStep], None]) -> None:
        forward = layer.impl.forward

        def forward_and_show(
            of_layer: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            attn_metadata: Any,
            output: torch.Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            result = forward(of_layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            noted = getattr(attn_metadata, _STEP, None)
            if noted is not None and noted[0].causal is not False:
                shown = output.view(len(output), query.shape[1], -1)
                computed(LayerStep(layer, query, kv_cache, shown, self._requests(*noted)))
            return result

        self._replace(layer.impl, "forward", forward_and_show)

    def _requests(self, common: Any, block_table: torch.Tensor) -> tuple[Request, ...]:
        rows = common.query_start_loc_cpu.tolist()
        ends = common.seq_lens.tolist()
        spans = common.mm_req_doc_ranges or {}
        return tuple(
            Request(
                rows[i],
                end - (rows[i + 1] - rows[i]),
                end,
                self.spans if self.spans is not None else tuple(spans.get(i, ())),
                block_table[i],
            )
            for i, end in enumerate(ends[: len(rows) - 1])
            if rows[i + 1] > rows[i]
        )

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._put.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, value)


@contextmanager
def computed_naively(runner: Any) -> Iterator[ReferenceLayers]:
    """Within the block, all attention layers of a model runner give what the naive form does."""
    layers = ReferenceLayers(runner)
    serve_with(layers)
    try:
        yield layers
    finally:
        layers.leave()


def serve_with(layers: ReferenceLayers) -> None:
    """From now on, all attention layers give what the naive form does. A step raises CannotCompute where it can't."""

    def put(step: LayerStep) -> None:
        for request in step.requests:
            at_once = max(1, MOST_SCORES // request.end)
            for start in range(request.start, request.end, at_once):
                end = min(start + at_once, request.end)
                row = request.first_row + start - request.start
                step.output[row : row + end - start] = layers.rows(step, request, range(start, end))

    layers.watch(put)


def serve_with_reference(worker: Any) -> str:
    """From now on this worker's attention is the naive form's. Returns "", or why it can't be, with nothing changed."""
    layers = ReferenceLayers(worker.model_runner)
    if not (reason := layers.why_unusable()):
        serve_with(layers)
    return reason


def _pages(
    layer: Any, kv_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Keys and values of all pages, (num_blocks, num_kv_heads, block_size, head_size), and how the CPU packs them.

    Raises: CannotCompute for a cache of another form.
    """
    head_size = layer.head_size
    if kv_cache.ndim != 4 or kv_cache.shape[-1] != 2 * head_size or not kv_cache.is_floating_point():
        raise CannotCompute(f"its KV cache is {tuple(kv_cache.shape)} of {kv_cache.dtype}")
    blocks, kv_heads, block_size, _ = kv_cache.shape
    if (isa := getattr(layer, "isa", None)) is None:
        keys, values = kv_cache.split(head_size, dim=-1)
        return keys, values, None, None
    keys, values = kv_cache.view(blocks, kv_heads, block_size * 2, -1).chunk(2, dim=2)
    return keys, values, *page_orders(isa, keys.dtype, block_size, head_size)


@cache
def page_orders(isa: str, dtype: torch.dtype, block_size: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the CPU's kernel for an instruction set keeps each element of a page, for keys and for values.

    Found by writing numbered pages with vLLM's own kernel, so no packing is assumed. The numbers go in three digits
    to base 128, which every dtype holds exactly. Returns two int64 (block_size * head_size,) on the CPU.
    """
    from vllm import _custom_ops as ops

    count = block_size * head_size
    numbers = torch.arange(count)
    slots = torch.arange(block_size)
    found = [torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)]
    for place in (1, 128, 128 * 128):
        digit = ((numbers // place) % 128).to(dtype).view(block_size, 1, head_size)
        pages = [torch.zeros(1, 1, block_size, head_size, dtype=dtype) for _ in found]
        ops.cpu_attn_reshape_and_cache(digit, digit, *pages, slots, isa)
        for where, page in zip(found, pages, strict=True):
            where += page.flatten().long() * place
    return found[0].argsort(), found[1].argsort()
