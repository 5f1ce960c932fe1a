# SPDX-License-Identifier: Apache-2.0
"""What a rank's hooks make of the items of a step, by vLLM's own functions."""

from types import SimpleNamespace

import pytest
import torch
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem
from vllm.multimodal.utils import group_and_batch_mm_kwargs

from tests.support.vllm_requests import original
from vllm_mmcache.base import settings
from vllm_mmcache.components.features.worker import hooks
from vllm_mmcache.components.features.worker.hooks import count_runs


@pytest.mark.parametrize(
    ("one_by_one", "in_step", "expected"),
    [(False, True, [3]), (True, True, [1, 1, 1]), (True, False, [3])],
    ids=["as stock", "one by one", "outside of a step"],
)
def test_the_setting_chooses_how_many_images_a_run_of_the_tower_has(
    one_by_one: bool, in_step: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's own function, which makes batches of the items of a step; vLLM also asks it for a batch to profile."""
    monkeypatch.setattr(settings, "_current", settings.Settings(tower_one_by_one=one_by_one))
    step = SimpleNamespace(copies=SimpleNamespace(is_asynchronous=False), ran=lambda end: None)
    monkeypatch.setattr(hooks, "current", lambda: step if in_step else None)
    field = MultiModalBatchedField()
    items = [
        ("image", MultiModalKwargsItem({"pixels": MultiModalFieldElem(data=torch.full((2, 2), number), field=field)}))
        for number in range(3)
    ]
    batches = [batch for _, *batch in count_runs(original(group_and_batch_mm_kwargs), None, (items,), {})]
    assert [number for number, _ in batches] == expected
    assert torch.cat([inputs["pixels"] for _, inputs in batches])[:, 0, 0].tolist() == [0, 1, 2]
