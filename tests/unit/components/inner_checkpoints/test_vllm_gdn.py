# SPDX-License-Identifier: Apache-2.0
"""What vLLM's metadata says of a piece, how a layer's states are copied, and when a step must not end."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec

from vllm_mmcache.components.inner_checkpoints.cuts import Cut, pieces_of
from vllm_mmcache.components.inner_checkpoints.vllm_gdn import (
    StateNotWritten,
    Step,
    part_for_cpu,
    part_for_kernels,
)

pytestmark = pytest.mark.answers

LENGTHS = {"decode": 1, "whole": 70, "cut": 200}
CUT = Cut(96, {0: 9})
PIECES = pieces_of(list(LENGTHS.values()), {2: [CUT]})
FULL = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
MAMBA = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")
RUNNING = torch.tensor([3, 5, 7], dtype=torch.int32)


def metadata(**changed: Any) -> GDNAttentionMetadata:
    """Of a decode, a prefill, and a prefill with a prefix hit that is cut."""
    fields: dict[str, Any] = {
        "num_prefills": 2,
        "num_prefill_tokens": 270,
        "num_decodes": 1,
        "num_decode_tokens": 1,
        "num_spec_decodes": 0,
        "num_spec_decode_tokens": 0,
        "num_actual_tokens": 271,
        "has_initial_state": torch.tensor([True, False, False]),
        "non_spec_query_start_loc": torch.tensor([0, 1, 71, 271], dtype=torch.int32),
        "non_spec_state_indices_tensor": RUNNING,
    }
    return GDNAttentionMetadata(**fields | changed)


def counts(part: Any) -> list[int]:
    return [
        part.num_decodes,
        part.num_decode_tokens,
        part.num_prefills,
        part.num_prefill_tokens,
        part.num_actual_tokens,
    ]


@pytest.mark.parametrize("part_for", [part_for_cpu, part_for_kernels])
def test_a_piece_is_a_batch_of_its_own(part_for: Any) -> None:
    """The decode is in the first piece alone, and the second goes on from the state that the first has left."""
    first, second = (part_for(metadata(), piece) for piece in PIECES)
    assert counts(first) == [1, 1, 2, 70 + 96, 167]
    assert counts(second) == [0, 0, 1, 104, 104]
    assert first.non_spec_query_start_loc.tolist() == [0, 1, 71, 167]
    assert second.non_spec_query_start_loc.tolist() == [0, 104]
    assert first.has_initial_state.tolist() == [True, False, False]
    assert second.has_initial_state.tolist() == [True]
    assert first.non_spec_state_indices_tensor.tolist() == [3, 5, 7]
    assert second.non_spec_state_indices_tensor.tolist() == [7]


def test_the_kernels_are_told_how_a_piece_is_divided() -> None:
    first, second = (part_for_kernels(metadata(), piece) for piece in PIECES)
    assert first.prefill_query_start_loc.tolist() == [0, 70, 166]
    assert first.prefill_state_indices.tolist() == [5, 7]
    assert first.prefill_has_initial_state.tolist() == [False, False]
    assert first.chunk_indices.tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]], "chunks of 64 tokens by request"
    assert first.chunk_offsets.tolist() == [0, 2, 4]
    assert second.prefill_query_start_loc.tolist() == [0, 104]
    assert second.prefill_has_initial_state.tolist() == [True]
    assert second.chunk_indices.tolist() == [[0, 0], [0, 1]]
    assert first.nums_dict[8]["nums"].tolist() == [1, 9, 12], "pieces of 8 tokens, for the convolution"


@pytest.mark.parametrize(
    "changed", [{"num_decodes": 3}, {"checkpoint": object()}, {"spec_sequence_masks": torch.tensor([True])}]
)
def test_a_batch_that_is_not_as_planned_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(StateNotWritten):
        part_for_cpu(metadata(**changed), PIECES[0])


def step_of(order: list[str]) -> Step:
    groups = [KVCacheGroupSpec(["gdn 0", "gdn 1"], MAMBA), KVCacheGroupSpec(["attention"], FULL)]
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups), input_batch=SimpleNamespace(req_ids=order)
    )
    return Step(runner, SimpleNamespace(num_scheduled_tokens=LENGTHS), {"cut": [CUT]})


def test_the_state_at_a_cut_is_copied_from_the_running_block_and_nothing_else_changes() -> None:
    """The core is as vLLM's: it changes the states of the requests in its piece, each by what it was given."""
    step = step_of(list(LENGTHS))
    for name in ("gdn 0", "gdn 1"):
        states = [torch.zeros(12, 2, 3), torch.zeros(12, 4)]
        layer = SimpleNamespace(prefix=name, kv_cache=states)
        seen: list[tuple[int, int]] = []

        def core(part: Any, tokens: slice, states: Any = states, seen: Any = seen) -> None:
            seen.append((tokens.start, tokens.stop))
            for state in states:
                state[part.non_spec_state_indices_tensor.long()] += tokens.stop - tokens.start

        step.compute(layer, metadata(), part_for_cpu, core)
        assert seen == [(0, 167), (167, 271)]
        for state in states:
            assert {n: state[n].unique().tolist() for n in range(12) if state[n].any()} == {
                3: [167],
                5: [167],
                7: [271],
                9: [167],
            }
    step.end()


def test_a_step_does_not_end_before_every_layer_has_its_states() -> None:
    step = step_of(list(LENGTHS))
    layer = SimpleNamespace(prefix="gdn 1", kv_cache=[torch.zeros(12, 4)])
    step.compute(layer, metadata(), part_for_cpu, lambda part, tokens: None)
    with pytest.raises(StateNotWritten, match="1 layers kept no state, such as gdn 0"):
        step.end()


def test_a_batch_of_other_requests_is_refused() -> None:
    with pytest.raises(StateNotWritten, match="not that of the step"):
        _ = step_of(["decode", "cut"]).pieces
    with pytest.raises(StateNotWritten, match="not that of the step"):
        step_of(list(LENGTHS)).compute(SimpleNamespace(), metadata(num_prefill_tokens=269), part_for_cpu, print)


def test_rows_are_those_of_the_batch_and_not_of_the_message() -> None:
    """vLLM sorts a batch as it likes."""
    assert [piece.row for piece in step_of(["cut", "decode", "whole"]).pieces] == [0, 2]
