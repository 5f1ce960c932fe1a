# SPDX-License-Identifier: Apache-2.0
"""`make bench`: the short forms are options that the benchmarks have, and a failure doesn't hide the others."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import bench, plot, summary

TINY = ("--tokens", "2048", "--images", "2", "--rounds", "1")


def test_every_benchmark_has_rows_and_all_but_one_a_short_form() -> None:
    benchmarks = {path.parent.name for path in (summary.ROOT / "benchmarks").glob("*/run.py")} - {"soak", "gpu_check"}
    assert benchmarks - {"cold_requests"} == set(bench.SHORT)
    assert benchmarks == {part.__name__ for part in summary.PARTS}


@pytest.mark.parametrize("name", bench.SHORT)
def test_short_forms_are_options_of_the_benchmark(name: str) -> None:
    parser = importlib.import_module(f"benchmarks.{name}.run").arguments()
    options = vars(parser.parse_args([*bench.SHORT[name], "--output", "somewhere"]))
    assert options.pop("output") == Path("somewhere")
    assert not options["save"], "a short form is no committed result"
    defaults = vars(parser.parse_args([]))
    assert any(options[one] != defaults[one] for one in options), "as long as the whole benchmark"


def test_one_fails_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(bench.SHORT, "observe", ("--no-such-option",))
    monkeypatch.setitem(bench.SHORT, "block_keys", TINY)
    monkeypatch.setattr(sys, "argv", ["bench", "--output", str(tmp_path), "--only", "observe", "block_keys"])
    (tmp_path / "observe.json").write_text('{"from": "an earlier run"}')
    with pytest.raises(SystemExit, match="failed: observe"):
        bench.main()
    said = capsys.readouterr().out
    assert "unrecognized arguments: --no-such-option" in said
    assert "| hash a prompt of 2,048 tokens with 2 images (sha256) |" in said
    assert not (tmp_path / "observe.json").exists()
    found = json.loads((tmp_path / "block_keys.json").read_text())
    assert found["options"] == {"tokens": 2048, "images": 2, "block_size": 16, "rounds": 1}
    assert (tmp_path / "table.md").read_text() in said
    points = plot.points_of({"block_keys": found})
    assert Image.open(tmp_path / "plot.png").text[plot.KEY] == plot.digest(points)


def test_the_committed_plot_shows_the_committed_results(tmp_path: Path) -> None:
    shown = plot.digest(plot.points_of(summary.committed()))
    assert Image.open(plot.PLOT).text[plot.KEY] == shown, "run: make bench-table"
    plot.draw(summary.committed(), tmp_path / "again.png")
    again = Image.open(tmp_path / "again.png")
    assert again.text[plot.KEY] == shown
    assert len(again.convert("L").getcolors()) > 4, "an empty picture"


def test_each_machine_is_named_once() -> None:
    machines = ["AMD EPYC, 2 cores", "Intel(R) Xeon(R) Processor, 2 cores", "AMD EPYC, 2 cores", "AMD EPYC, 8 cores"]
    results = {str(number): {"machine": machine, "vllm": "0.32.0"} for number, machine in enumerate(machines)}
    said = "2 cores of AMD EPYC or Intel Xeon, vLLM 0.32.0; 8 cores of AMD EPYC, vLLM 0.32.0"
    assert summary.machines_of(results) == said


def test_another_number_is_another_plot() -> None:
    points = plot.points_of(summary.committed())
    assert {point.group for point in points} == {*plot.TITLES, "reuse"}
    assert all(point.stock >= 0 and point.mmcache >= 0 for point in points)
    changed = [*points[:-1], points[-1]._replace(mmcache=points[-1].mmcache + 0.01)]
    assert plot.digest(changed) != plot.digest(points)
