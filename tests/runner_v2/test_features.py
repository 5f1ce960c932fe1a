# SPDX-License-Identifier: Apache-2.0
"""The feature store on vLLM's second model runner, through Triton's interpreter: one run of the tower per image."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import runner_v2
from tests.runner_v2.on_path.interpreted_cpu import bfloat16

ROOT = Path(__file__).parents[2]


@pytest.mark.engine
@pytest.mark.parametrize("family", ["qwen3-vl", "gemma3"])
def test_one_run_of_the_tower_per_image(family: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.runner_v2.worker", family, str(tmp_path)],
        env=os.environ | runner_v2.environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["runner"] == "vllm.v1.worker.cpu.model_runner.CPUModelRunner"
    assert found["runs"] == [2, 0, 1, 0]
    assert found["cached"] > 0
    assert found["worst"] <= 1e-3
    assert found["spoiled features are noticed"]


def test_bfloat16_is_rounded_as_torch_does() -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e3
    numbers = torch.cat([numbers, torch.tensor([0.0, -0.0, 1.00390625, 1.01171875, float("inf"), float("nan")])])
    bits = bfloat16.rounded(numbers.numpy())
    expected = numbers.to(torch.bfloat16)
    assert np.array_equal(bits[:-1], expected.view(torch.uint16).numpy()[:-1])
    assert np.array_equal(bfloat16.widened(bits)[:-1], expected.float().numpy()[:-1])
    assert np.isnan(bfloat16.widened(bits)[-1])
