# SPDX-License-Identifier: Apache-2.0
"""What Qwen's towers do here in place of their kernel gives what the kernel gives."""

import pytest
import torch


@pytest.mark.interpreter
def test_position_embeddings_are_those_of_the_kernel() -> None:
    from vllm.model_executor.models import qwen3_vl

    embeddings = torch.randn(48 * 48, 64, generator=torch.Generator().manual_seed(0))
    size = (1, 4, 6, 48, 2, torch.float32)  # frames, rows, columns, the grid's side, merged, of the result
    interpreted = qwen3_vl.triton_pos_embed_interpolate(embeddings, *size)
    expected = qwen3_vl.pos_embed_interpolate_native(embeddings, *size)
    torch.testing.assert_close(interpreted, expected)
    assert not torch.equal(expected, expected.roll(1, 0))
    assert not qwen3_vl.HAS_TRITON
