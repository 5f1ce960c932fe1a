# SPDX-License-Identifier: Apache-2.0
"""The cost model counts the tower's operations as torch does, and what was committed is what it makes of its inputs."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from benchmarks.feature_costs import INPUTS, add_model, packages, seconds, tower_flops
from benchmarks.results import Result, committed

MEASURED = {"read_warm": 5.0, "blake3": 5.0, "valkey": 1.5}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "deepstack_visual_indexes": (0, 1)}
# Tokens of a picture, and operations that torch counted in the tower of Qwen3-VL-8B with its 27 layers.
OF_THE_WHOLE = [(256, 1_058_097_070_080), (880, 4_730_317_701_120), (2040, 15_676_424_847_360)]
PACKAGES = {(one.model, one.picture): one for one in packages()}


def attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """By shapes; torch's counter leaves the CPU's kernel out."""
    return sdpa_flop_count(query, key, value)


@torch.inference_mode()
def counted(width: int, height: int) -> tuple[int, int]:
    """Tokens and operations of a picture, as torch counts them in Transformers' tower with two layers."""
    config = Qwen3VLVisionConfig(out_hidden_size=4096, depth=2, **SMALL)
    config._attn_implementation = "sdpa"
    tower = Qwen3VLVisionModel(config).to(torch.bfloat16).eval()
    columns, rows = width // 16, height // 16
    pixels = torch.randn(rows * columns, 3 * 2 * 16 * 16, dtype=torch.bfloat16)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={kernel: attention_flops}) as counter:
        given = tower(pixels, grid_thw=torch.tensor([[1, rows, columns]]))
    return len(given.pooler_output), counter.get_total_flops()


@pytest.mark.parametrize(("width", "height"), [(64, 64), (160, 96)])
def test_the_formula_counts_what_torch_counts(width: int, height: int) -> None:
    tokens, operations = counted(width, height)
    small = {**INPUTS["towers"]["qwen3-vl"], "layers": 2, "hidden": 64, "inner": 96, "mergers": 3}
    assert tower_flops(small, tokens, 4096) == operations
    assert tokens == width * height // 32**2
    assert tower_flops({**small, "layers": 3}, tokens, 4096) != operations


def test_packages_are_those_of_the_models() -> None:
    assert PACKAGES["Qwen3-VL-8B", "1080p"].num_tokens == 60 * 34
    assert PACKAGES["Qwen3-VL-8B", "1080p"].num_bytes == 60 * 34 * 4096 * 4 * 2
    assert PACKAGES["Gemma 4 31B", "280 tokens"].num_bytes == 280 * 5376 * 2


def test_a_stage_is_as_slow_as_its_slowest_medium() -> None:
    large = PACKAGES["Qwen3-VL-8B", "1080p"]._replace(num_bytes=10**9)
    assert seconds(large, "H200", {**MEASURED, "valkey": 0.1})["Valkey, 100 GbE"] == pytest.approx(10 + 1 / 20 + 1 / 50)
    assert seconds(large, "H200", MEASURED)["RAM"] == pytest.approx(1 / 50)
    assert seconds(large, "A100", MEASURED)["RAM"] == pytest.approx(1 / 25)


def test_larger_pictures_are_better_worth_loading() -> None:
    """The tower's time grows with the square of the patches, a load with their number."""
    times = [seconds(one, "H200", MEASURED) for (model, _), one in PACKAGES.items() if model == "Qwen3-VL-8B"]
    shares = [one["tower"] / one["NVMe"] for one in times]
    assert shares == sorted(set(shares))


def test_every_number_says_where_it_is_from() -> None:
    for group in ("gpus", "towers", "models"):
        assert all(one["source"] for one in INPUTS[group].values())
    for name, rate in INPUTS["rates"].items():
        assert rate.get("source") or rate["measured"] in MEASURED, name
    assert INPUTS["efficiency"]["source"]
    named = {name for stages in INPUTS["tiers"].values() for stage in stages for name in stage}
    assert named <= {*INPUTS["rates"], "h2d"}


def test_the_committed_result_is_what_the_model_makes_of_it() -> None:
    found = committed("feature_costs")["found"]
    again = Result()
    add_model(again, {name: counted["gb_s"]["here"] for name, counted in found.items() if "gb_s" in counted})
    assert len(again.found) == len(PACKAGES) * len(INPUTS["gpus"])
    for case, counted in again.found.items():
        assert counted["time_s"] == pytest.approx(found[case]["time_s"])


@pytest.mark.parametrize(("tokens", "operations"), OF_THE_WHOLE)
def test_the_formula_counts_what_torch_counted(tokens: int, operations: int) -> None:
    assert tower_flops(INPUTS["towers"]["qwen3-vl"], tokens, 4096) == operations
