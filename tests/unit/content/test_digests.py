# SPDX-License-Identifier: Apache-2.0
"""Digests of inputs and weights: equal for equal content, and different for anything else."""

import itertools

import pytest
import torch

from vllm_mmcache.content import digests
from vllm_mmcache.content.digests import inputs_digest, tensors_digest

PIXELS = torch.arange(12, dtype=torch.float32)


def test_each_difference_shows() -> None:
    inputs = [
        {},
        {"pixel_values": PIXELS},
        {"pixel_values": PIXELS.reshape(3, 4)},
        {"pixel_values": PIXELS.reshape(4, 3)},
        {"pixel_values": PIXELS.to(torch.float64)},
        {"pixel_values": PIXELS.view(torch.int32)},
        {"pixel_value": PIXELS},
        {"pixel_values": [PIXELS]},
        {"pixel_values": [PIXELS[:5], PIXELS[5:]]},
        {"pixel_values": [PIXELS[:6], PIXELS[6:]]},
        {"pixel_values": PIXELS, "image_grid_thw": torch.tensor([1, 3, 4])},
        {"pixel_values": PIXELS, "image_grid_thw": torch.tensor([1, 4, 3])},
        {"pixel_values": PIXELS, "image_grid_thw": None},
        {"pixel_values": torch.empty(0)},
        {"pixel_values": torch.empty(0, 3)},
    ]
    digests = [inputs_digest(one) for one in inputs]
    for (one, left), (other, right) in itertools.combinations(zip(inputs, digests, strict=True), 2):
        assert left != right, (one, other)


def test_equal_content_is_equal() -> None:
    """Whatever the order of the names, the strides, or the device that it lay on."""
    grid = torch.tensor([1, 3, 4])
    one = inputs_digest({"a": PIXELS.reshape(3, 4), "b": grid})
    assert one == inputs_digest({"b": grid.clone(), "a": PIXELS.reshape(3, 4).t().contiguous().t()})
    assert tensors_digest([("a", PIXELS), ("b", grid)]) == tensors_digest([("b", grid), ("a", PIXELS)])
    assert inputs_digest({"a": PIXELS.to(torch.bfloat16)}) == inputs_digest({"a": PIXELS.to(torch.bfloat16)})


def test_pieces_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    named = [("b", PIXELS.reshape(3, 4).t()), ("a", torch.tensor(1.0)), ("c", torch.empty(0))]
    whole, checks = tensors_digest(named), []
    monkeypatch.setattr(digests, "PIECE_BYTES", 7)
    assert tensors_digest(named, lambda: checks.append(1)) == whole
    assert len(checks) == 3 + 7 + 1  # each tensor, and each piece of 48 and 4 bytes
