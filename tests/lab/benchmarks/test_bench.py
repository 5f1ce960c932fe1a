# SPDX-License-Identifier: Apache-2.0
"""One runner: options and short forms are data, every result has one form, and the pages show what was committed."""

import importlib.util
import json
import math
import subprocess
import sys
from argparse import Namespace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks import bench, results, run, summary
from benchmarks.catalogue import ABOUT, BENCHMARKS, command, listing
from benchmarks.results import Result
from benchmarks.rows import FAMILIES, ROWS, TARGETS, Row, Target, add_targets, spread
from benchmarks.server_scenarios import SCENARIOS

REPLAYS = {"image_questions", "cold_requests", "agents", "computer_use", "image_service", "gallery", "restart"}


def shown_in(plot: Path) -> Any:
    """The digest of the points that a plot shows, as its file says."""
    return Image.open(plot).info[summary.KEY]


def test_every_benchmark_can_be_run_and_shown() -> None:
    modules = {
        name for name in BENCHMARKS if importlib.util.find_spec(ABOUT["modules"].get(name, f"benchmarks.{name}"))
    }
    assert not modules & set(SCENARIOS)
    assert set(BENCHMARKS) - modules - set(SCENARIOS) == REPLAYS
    assert {row.benchmark for row in ROWS} == set(BENCHMARKS)


@pytest.mark.process
def test_every_benchmark_has_the_target_that_its_rows_name() -> None:
    """Make says what it would run, the name of each benchmark among it, and its list has each of them."""
    make = ["make", "--no-print-directory", "STAMP="]
    for name in BENCHMARKS:
        for target in {command(name), f"bench-{name.replace('_', '-')}"}:
            dry = [*make, "--dry-run", target, "ARGS=--short"]
            said = subprocess.run(dry, cwd=results.ROOT, capture_output=True, text=True, check=True).stdout
            assert f"-m benchmarks.run {name} --short\n" in said
    shown = subprocess.run([*make, "help"], cwd=results.ROOT, capture_output=True, text=True, check=True).stdout
    assert all(f" {benchmark.what}\n" in shown for benchmark in BENCHMARKS.values())
    assert all(f"{name} " in line for name, line in zip(BENCHMARKS, listing().splitlines(), strict=True))


def test_every_replay_is_there() -> None:
    """Its cases are named as those of the rows, and their families have a name in the table."""
    from benchmarks.replays import REPLAYS as FOUND  # vLLM comes with it

    assert set(FOUND) == REPLAYS
    for row in (row for row in ROWS if row.benchmark in REPLAYS):
        if row.text in {f"{one.text} (at most {one.limit:g})" for one in TARGETS.get(row.benchmark, ())}:
            continue
        (case,), options = row.cases, Namespace(**BENCHMARKS[row.benchmark].options)
        asked = [f"{options.families[0]}, {name}" for name in FOUND[row.benchmark].asks(options, options.families[0])]
        tagged = [
            f"{name}, {tokens} tokens, {images} images"
            for name in asked
            for tokens in (4000, 8000)
            for images in (1, 4)
        ]
        assert any(fnmatchcase(name, case) for name in (*asked, *tagged)), case
    assert all(set(BENCHMARKS[name].options["families"]) <= set(FAMILIES) for name in REPLAYS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_options(name: str) -> None:
    benchmark = BENCHMARKS[name]
    whole, paths = run.options_of(name, ["--output", "somewhere"])
    assert vars(whole) == dict(benchmark.options)
    assert paths == [Path("somewhere") / f"{name}.json"], "not saved unless it is asked for"
    assert run.options_of(name, ["--save"])[1] == [results.FOLDER / f"{name}.json"]
    short = vars(run.options_of(name, ["--short"])[0])
    assert short == {**benchmark.options, **benchmark.short} != benchmark.options
    assert set(benchmark.short) <= set(benchmark.options)
    option, value = next((one, value) for one, value in benchmark.options.items() if type(value) in (int, float))
    given = vars(run.options_of(name, ["--short", f"--{option.replace('_', '-')}", str(value + 1)])[0])
    assert given == {**short, option: value + 1}, "what is said wins over the form"


@pytest.mark.process
def test_one_fails_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--output", str(tmp_path), "--only", "lost", "block_keys"])
    (tmp_path / "lost.json").write_text('{"from": "an earlier run"}')
    with pytest.raises(SystemExit, match="failed: lost"):
        bench.main()
    said = capsys.readouterr().out
    assert "invalid choice: 'lost'" in said
    assert "| hash a prompt of 131,072 tokens with 100 images (sha256) |" in said
    assert not (tmp_path / "lost.json").exists()
    found = json.loads((tmp_path / "block_keys.json").read_text())
    assert found["options"]["rounds"] == BENCHMARKS["block_keys"].short["rounds"]
    assert set(found["found"]) == {"sha256", "xxhash"}
    assert (tmp_path / "table.md").read_text() in said
    points = summary.points_of({"block_keys": found})
    assert shown_in(tmp_path / "plot.png") == summary.digest(points)


@pytest.mark.process
def test_a_result_is_kept_and_no_other_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = Result()
    result.add("case", "time_s", {"stock": 2.0, "mmcache": 0.5})
    assert capsys.readouterr().out == "case: time_s stock 2, mmcache 0.5 (0.250)\n"
    results.save(tmp_path / "one.json", result, {"images": 2})
    kept = json.loads((tmp_path / "one.json").read_text())
    assert kept["found"] == {"case": {"time_s": {"stock": 2.0, "mmcache": 0.5}}}
    assert {"commit", "machine", "python", "vllm", "command", "options", "details"} <= set(kept)
    result.add("case", "time_s", {"stock": math.inf})
    with pytest.raises(ValueError, match="a number that is none"):
        results.save(tmp_path / "two.json", result, {})


def test_rows() -> None:
    """Cells, families and points of one result."""
    counted = {"time_s": {"stock": 0.2, "mmcache": 0.1}, "tower_runs": {"stock": 40, "mmcache": 0}}
    counted |= {"cached_tokens": {"stock": 5, "mmcache": 9}, "best_tokens": {"stock": 10, "mmcache": 10}}
    slower = {**counted, "time_s": {"stock": 0.2, "mmcache": 0.3}}
    found = {"options": {"images": 3}, "found": {"gemma3, again": counted, "qwen3-vl, again": slower}}
    time = Row("agents", "{images} images: time", ["*, again"], ["time_s"], "time", "images")
    assert time.line(found) == (
        "| 3 images: time, Qwen3-VL / Gemma 3 | 200 / 200 ms | 300 (1.50) / 100 (0.50) ms | `make bench-agents` |"
    )
    assert [(point.label, point.mmcache) for point in time.points(found)] == [
        ("images, Qwen3-VL", 0.3), ("images, Gemma 3", 0.1)
    ]  # fmt: skip
    share = Row("gallery", "shares", ["gemma3, again"], ["cached_tokens/best_tokens"], "share")
    assert share.line(found) == "| shares | 0.50 | 0.90 | `make bench-features` |"
    assert list(share.points(found)) == [], "without a label"
    counted["best_tokens"] = {"stock": 0, "mmcache": 0}
    assert share.line(found) == "", "a part of nothing"
    runs = Row("agents", "runs", ["gemma3, again"], ["tower_runs"], "count")
    assert runs.line(found) == "| runs | 40 | 0 | `make bench-agents` |"
    assert Row("agents", "of another", ["*, other"], ["time_s"], "time").line(found) == ""


def test_rows_that_are_there_once_for_each_value() -> None:
    several = [{"tier": ["disk", "valkey"], "place": ["a folder", "Valkey"]}, ["in <place>", ["<tier>"]], ["again"]]
    assert list(spread([["first"], several])) == [
        ["first"], ["in a folder", ["disk"]], ["again"], ["in Valkey", ["valkey"]], ["again"]
    ]  # fmt: skip


def test_a_target_is_of_the_worst_case() -> None:
    found: dict[str, dict[str, dict[str, float]]] = {
        "gemma3, cold": {"steps": {"stock": 4, "mmcache": 4}, "pairs_ratio": {"mmcache": 0.9}},
        "qwen3.5, cold": {"steps": {"stock": 4, "mmcache": 5}, "pairs_ratio": {"mmcache": 1.1}},
        "qwen3.5, hot": {"steps": {"stock": 1, "mmcache": 9}},
    }
    steps = Target("steps", ["*, cold", "steps", "mmcache"], ["*, cold", "steps", "stock"], 1.0)
    assert steps.ratio(found) == 1.25, "each by its own"
    assert Target("pairs", ["*, cold", "pairs_ratio", "mmcache"], [], 1.02).ratio(found) == 1.1
    by_another = Target("hot", ["qwen3.5, hot", "steps", "mmcache"], ["gemma3, cold", "steps", "stock"], 1.0)
    assert by_another.ratio(found) == 9 / 4
    assert Target("none", ["*, warm", "steps", "mmcache"], ["*, warm", "steps", "stock"], 1.0).ratio(found) is None
    result = Result({f"{case}, 4000 tokens, 1 images": found[case] for case in ("gemma3, cold", "qwen3.5, cold")})
    add_targets("cold_requests", result)
    kept = {case: counted["ratio"] for case, counted in result.found.items() if "ratio" in counted}
    assert [(one["mmcache"], one["at most"]) for one in kept.values()] == [(1.25, 1.0), (1.1, 1.02)], (
        "what was measured"
    )
    assert [row.cases for row in ROWS if row.cases[0] in kept] == [[case] for case in kept], "and it has a row"


def test_the_pages_show_the_committed_results() -> None:
    pages = summary.pages()
    for path, content in pages.items():
        text = path.read_text()
        assert summary.between_marks(text, summary.BEGIN, content) == text, "run: make bench-table"
        changed = text.replace(content, content.replace("| 0", "| 9"))
        assert changed != text
        assert summary.between_marks(changed, summary.BEGIN, content) == text
    with pytest.raises(ValueError, match="lacks the marks"):
        summary.between_marks("no marks", summary.BEGIN, "")
    readme = [line for line in pages[results.ROOT / "README.md"].splitlines() if line.startswith("| ")][1:]
    whole = pages[results.ROOT / "benchmarks" / "README.md"].splitlines()
    assert 0 < len(readme) <= 8
    assert set(readme) < set(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "points_of"),
    [(summary.PLOT, summary.points_of), (summary.IN_README, summary.points_in_readme)],
    ids=["all", "readme"],
)
def test_the_committed_plots_show_the_committed_results(path: Path, points_of: Any, tmp_path: Path) -> None:
    points = points_of(summary.all_committed())
    shown = summary.digest(points)
    assert path == summary.PLOT or 0 < len(points) <= 8
    assert shown_in(path) == shown, "run: make bench-table"
    summary.draw(points, tmp_path / "again.png")
    assert shown_in(tmp_path / "again.png") == shown
    colours = Image.open(tmp_path / "again.png").convert("L").getcolors()
    assert colours is not None
    assert len(colours) > 4, "an empty picture"


def test_each_machine_is_named_once() -> None:
    machines = ["AMD EPYC, 2 cores", "Intel(R) Xeon(R) Processor, 2 cores", "AMD EPYC, 2 cores", "AMD EPYC, 8 cores"]
    found = {str(number): {"machine": machine, "vllm": "0.32.0"} for number, machine in enumerate(machines)}
    said = "2 cores of AMD EPYC or Intel Xeon, vLLM 0.32.0; 8 cores of AMD EPYC, vLLM 0.32.0"
    assert summary.machines_of(found) == said
    assert summary.by_machine(found) == (
        "- AMD EPYC with 2 cores: `0`, `2`.\n- AMD EPYC with 8 cores: `3`.\n- Intel Xeon with 2 cores: `1`.\n"
    )


def test_another_number_is_another_plot() -> None:
    points = summary.points_of(summary.all_committed())
    assert {point.group for point in points} == {*summary.TITLES, "reuse"}
    assert all(point.stock >= 0 and point.mmcache >= 0 for point in points)
    changed = [*points[:-1], points[-1]._replace(mmcache=points[-1].mmcache + 0.01)]
    assert summary.digest(changed) != summary.digest(points)
