# SPDX-License-Identifier: Apache-2.0
"""A KV connector that moves real bytes: what a request has cached is copied out when it ends, and in for another one.

Engine and worker are one process here, so what is kept is this module's `KEPT`. `PLAN` says what the connector does:
where what it has ends, whether it loads beside the steps, when a load arrives, and which blocks fail. A block that
fails is left with garbage in it, so that whoever reads it is found out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

GARBAGE = 3.0


@dataclass
class Plan:
    """What the connector is to do, and what it has done."""

    most_tokens: int | None = None  # what it has ends here at the latest
    beside: bool = False  # loads while other requests run
    is_held: bool = False  # loads that run beside don't arrive
    fails_from: int | None = None  # the first block whose load fails
    loaded: list[tuple[int, int]] = field(default_factory=list)  # of each load: first and last token
    failed: set[str] = field(default_factory=set)  # requests; not found for them again, or they would never end


PLAN = Plan()
KEPT: dict[tuple[int, bytes], list[torch.Tensor]] = {}
"""KV group and block key -> the block's bytes, of each of the group's layers."""


def connector() -> tuple[tuple[str, Any], ...]:
    """The arguments of an engine that has it; a load that fails is calculated again."""
    config = {
        "kv_connector": "MovingConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": __name__,
        "kv_load_failure_policy": "recompute",
    }
    return (("kv_transfer_config", config),)


def plan(**chosen: Any) -> Plan:
    """Put another plan in force."""
    for name, value in vars(Plan(**chosen)).items():
        setattr(PLAN, name, value)
    return PLAN


@dataclass
class Load:
    request_id: str
    beside: bool
    blocks: list[tuple[int, bytes, int, bool]]  # KV group, block key, id of the block to fill, whether it fails


@dataclass
class Metadata(KVConnectorMetadata):
    loads: list[Load]


class MovingConnector(KVConnectorBase_V1, SupportsHMA):
    """Both of its roles, in one process."""

    layers: dict[str, Any] = {}  # noqa: RUF012  # of the worker; the scheduler's side copies out

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.groups = kv_cache_config.kv_cache_groups
        self.found: dict[str, tuple[int, int]] = {}
        self.loads: list[Load] = []
        self.waiting: list[Load] = []
        self.errors: set[int] = set()

    # The scheduler's side.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self.pool = kv_cache_manager.block_pool
        self.block_tokens = int(self.pool.hash_block_size)
        assert all(group.kv_cache_spec.block_size == self.block_tokens for group in self.groups)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if request.request_id in PLAN.failed:
            return 0, False
        size = self.block_tokens
        most = request.num_tokens - 1 if PLAN.most_tokens is None else min(PLAN.most_tokens, request.num_tokens - 1)
        for end in range(min(most // size, len(request.block_hashes)), num_computed_tokens // size, -1):
            if self._has(request, num_computed_tokens // size, end):
                self.found[request.request_id] = (num_computed_tokens // size, end)
                return end * size - num_computed_tokens, PLAN.beside
        return 0, False

    def _has(self, request: Any, start: int, end: int) -> bool:
        return all(
            (number, bytes(request.block_hashes[block])) in KEPT
            for number, group in enumerate(self.groups)
            for block in range(max(start, first_needed(group.kv_cache_spec, end)), end)
        )

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        start, end = self.found.pop(request.request_id)
        assert (end - start) * self.block_tokens == num_external_tokens
        wanted = [
            (number, bytes(request.block_hashes[block]), ids[block], PLAN.fails_from in range(block + 1))
            for number, ids in enumerate(blocks.get_block_ids())
            for block in range(start, end)
            if ids[block] != self.pool.null_block.block_id
        ]
        self.loads.append(Load(request.request_id, PLAN.beside, wanted))
        PLAN.loaded.append((start * self.block_tokens, end * self.block_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        loads, self.loads = self.loads, []
        return Metadata(loads)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        for number, group in enumerate(self.groups):
            for key in request.block_hashes:
                cached = self.pool.get_cached_block(BlockHash(key), [number])
                if cached is not None and (number, bytes(key)) not in KEPT:
                    KEPT[number, bytes(key)] = [
                        part[cached[0].block_id].clone() for name in group.layer_names for part in self._parts(name)
                    ]
        return False, None

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        MovingConnector.layers = kv_caches

    def _parts(self, layer: str) -> list[torch.Tensor]:
        kept = self.layers[layer]
        return [kept] if isinstance(kept, torch.Tensor) else list(kept)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        for load in metadata.loads:
            if load.beside:
                self.waiting.append(load)
            else:
                self.errors |= self._fill(load)

    def _fill(self, load: Load) -> set[int]:
        """Copy the bytes in. The blocks that failed."""
        failed = set()
        for number, key, block_id, fails in load.blocks:
            parts = [part for name in self.groups[number].layer_names for part in self._parts(name)]
            for part, kept in zip(parts, KEPT[number, key], strict=True):
                part[block_id] = torch.full_like(kept, GARBAGE) if fails else kept
            if fails:
                failed.add(block_id)
        if failed:
            PLAN.failed.add(load.request_id)
        return failed

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        if not PLAN.is_held:
            for load in self.waiting:
                failed = self._fill(load)
                results.finished_recving.add(load.request_id)
                if failed and len(self.groups) > 1:
                    results.failed_recving.add(load.request_id)
                else:
                    self.errors |= failed
            self.waiting = []
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        errors, self.errors = self.errors, set()
        return errors

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return


def first_needed(spec: Any, end: int) -> int:
    """The first of the blocks below `end` that a group must have to go on there."""
    if isinstance(spec, MambaSpec):
        return end - 1
    if isinstance(spec, SlidingWindowSpec):
        return max(0, end * spec.block_size - spec.sliding_window + 1) // spec.block_size
    return 0
