# SPDX-License-Identifier: Apache-2.0
"""What a rank's hooks make of the items of a step, by vLLM's own functions."""

import pytest
import torch
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem
from vllm.multimodal.utils import group_and_batch_mm_kwargs

from tests.support.vllm_requests import original
from vllm_mmcache.base import settings
from vllm_mmcache.components.features.worker.hooks import count_runs


@pytest.mark.parametrize(("one_by_one", "expected"), [(False, [3]), (True, [1, 1, 1])], ids=["as stock", "one by one"])
def test_the_setting_chooses_how_many_images_a_run_of_the_tower_has(
    one_by_one: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM's own function, which makes batches of the items of a step."""
    monkeypatch.setattr(settings, "_current", settings.Settings(tower_one_by_one=one_by_one))
    field = MultiModalBatchedField()
    items = [
        ("image", MultiModalKwargsItem({"pixels": MultiModalFieldElem(data=torch.full((2, 2), number), field=field)}))
        for number in range(3)
    ]
    batches = [batch for _, *batch in count_runs(original(group_and_batch_mm_kwargs), None, (items,), {})]
    assert [number for number, _ in batches] == expected
    assert torch.cat([inputs["pixels"] for _, inputs in batches])[:, 0, 0].tolist() == [0, 1, 2]
