# SPDX-License-Identifier: Apache-2.0
"""The cost model counts the tower's operations as torch does, and the page shows what was committed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.feature_costs import page, plot, tower
from benchmarks.feature_costs.model import Inputs, Package, inputs_with, measured_here, tower_flops

MEASURED = {"read_warm": 5.0, "blake3": 5.0, "valkey": 1.5}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "deepstack_visual_indexes": (0, 1)}


@pytest.fixture
def inputs() -> Inputs:
    return inputs_with(MEASURED)


@pytest.mark.parametrize(("width", "height"), [(64, 64), (160, 96)])
def test_the_formula_counts_what_torch_counts(width: int, height: int, inputs: Inputs) -> None:
    model = tower.load(layers=2, **SMALL)
    found = tower.measure(model, {"picture": (width, height)}, rounds=1)["picture"]
    small = {**inputs.said["towers"]["qwen3-vl"], "layers": 2, "hidden": 64, "inner": 96, "mergers": 3}
    assert tower_flops(small, found["num_tokens"], 4096) == found["counted_flops"]
    assert found["num_tokens"] == width * height // 32**2
    assert tower_flops({**small, "layers": 3}, found["num_tokens"], 4096) != found["counted_flops"]


def test_the_committed_towers_are_counted_alike() -> None:
    inputs = inputs_with(MEASURED)
    found = measured_here()["tower"]
    assert found
    for one in found.values():
        assert tower_flops(inputs.said["towers"]["qwen3-vl"], one["num_tokens"], 4096) == one["counted_flops"]


def test_packages_are_those_of_the_models(inputs: Inputs) -> None:
    packages = {(one.model, one.picture): one for one in inputs.packages()}
    assert packages["Qwen3-VL-8B", "1080p"].num_tokens == 60 * 34
    assert packages["Qwen3-VL-8B", "1080p"].num_bytes == 60 * 34 * 4096 * 4 * 2
    assert packages["Gemma 4 31B", "280 tokens"].num_bytes == 280 * 5376 * 2


def test_a_stage_is_as_slow_as_its_slowest_medium(inputs: Inputs) -> None:
    slow = replace(inputs, measured={**MEASURED, "valkey": 0.1})
    assert slow.load_s("Valkey, 100 GbE", 10**9, "H200") == pytest.approx(10 + 1 / 20 + 1 / 50)
    assert inputs.load_s("RAM", 10**9, "H200") == pytest.approx(1 / 50)
    assert inputs.load_s("RAM", 10**9, "A100") == pytest.approx(1 / 25)


def test_larger_pictures_are_better_worth_loading(inputs: Inputs) -> None:
    """The tower's time grows with the square of the patches, a load with their number."""
    own = [one for one in inputs.packages() if one.model == "Qwen3-VL-8B"]
    shares = [inputs.break_even("NVMe", one, "H200") for one in own]
    assert shares == sorted(shares)
    assert len(set(shares)) == len(shares)


@pytest.mark.parametrize(("tower_share", "said"), [(0.0, "never"), (1e9, "always")])
def test_verdicts(tower_share: float, said: str, inputs: Inputs) -> None:
    inputs.said["efficiency"]["value"] = 1 / tower_share if tower_share else 1e12  # type: ignore[index]
    assert page.verdict(inputs, "NVMe", "H200") == said


def test_a_verdict_names_the_first_picture_and_who_differs(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_even(_: Inputs, tier: str, package: Package, gpu: str) -> float:
        return float(package.model == "Qwen3-VL-8B" and package.num_tokens > 3000)

    monkeypatch.setattr(Inputs, "break_even", break_even)
    assert page.verdict(inputs, "NVMe", "H200") == "8B from 1440p; 32B, 235B-A22B, Gemma 4 never"


def test_every_number_says_where_it_is_from(inputs: Inputs) -> None:
    said = inputs.said
    for group in ("gpus", "towers", "models"):
        assert all(one["source"] for one in said[group].values())
    for name, rate in said["rates"].items():
        assert rate.get("source") or rate["measured"] in MEASURED, name
    assert said["efficiency"]["source"]
    assert {name for stages in said["tiers"].values() for stage in stages for name in stage} <= {*said["rates"], "h2d"}


def test_the_page_shows_the_committed_result() -> None:
    shown = page.PAGE.read_text()
    assert page.written(shown) == shown, "run: python -m benchmarks.feature_costs.page --write"
    with pytest.raises(ValueError, match="lacks the marks"):
        page.written("no marks")


def test_the_plot_shows_the_committed_result(tmp_path: Path) -> None:
    found: dict[str, Any] = measured_here()
    shown = plot.digest(found)
    assert Image.open(plot.PLOT).text[plot.KEY] == shown, "run: python -m benchmarks.feature_costs.page --write"
    plot.draw(found, tmp_path / "again.png")
    again = Image.open(tmp_path / "again.png")
    assert again.text[plot.KEY] == shown
    assert len(again.convert("L").getcolors()) > 4, "an empty picture"
    found["measured"]["blake3"] += 0.01
    assert plot.digest(found) != shown


def test_codecs_give_back_what_they_were_given() -> None:
    content = bytes(range(256)) * 64
    assert tower.codecs()
    for pack, unpack in tower.codecs().values():
        assert unpack(pack(content)) == content
