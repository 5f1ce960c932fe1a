# SPDX-License-Identifier: Apache-2.0
"""The cure of the interpreter's bfloat16 rounds as torch does."""

import numpy as np
import torch

from tests.support.runner_v2.on_path.interpreted_cpu import bfloat16


def test_bfloat16_is_rounded_as_torch_does() -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e3
    numbers = torch.cat([numbers, torch.tensor([0.0, -0.0, 1.00390625, 1.01171875, float("inf"), float("nan")])])
    bits = bfloat16.rounded(numbers.numpy())
    expected = numbers.to(torch.bfloat16)
    assert np.array_equal(bits[:-1], expected.view(torch.uint16).numpy()[:-1])
    assert np.array_equal(bfloat16.widened(bits)[:-1], expected.float().numpy()[:-1])
    assert np.isnan(bfloat16.widened(bits)[-1])
