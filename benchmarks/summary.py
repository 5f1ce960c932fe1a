# SPDX-License-Identifier: Apache-2.0
"""The table of measurements and its plot, made from results: the committed ones for the pages, others for `make bench`.

python -m benchmarks.summary          # print the whole table
python -m benchmarks.summary --write  # write README.md (a few rows), benchmarks/README.md (all) and the plots
"""

import argparse
import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from benchmarks.results import FOLDER, ROOT, committed
from benchmarks.rows import ROWS, Loaded, Point

WIDTH = 120  # of a line of Markdown
BEGIN, END = "<!-- made by python -m benchmarks.summary -->\n", "<!-- end -->\n"
LINKS = "[All rows, and how to repeat and read them](benchmarks/README.md); [as a plot](docs/benchmarks.png).\n"
NOTE = (
    "The models are tiny, with random weights. Counts (tokens reused, runs of the vision tower, pictures decoded) "
    "carry over to a GPU. Times and their ratios were measured on a CPU and do not."
)
PLOT, IN_README = ROOT / "docs" / "benchmarks.png", ROOT / "docs" / "readme.png"
KEY = "Points"  # of the text in the file that says what is shown
LEAST = 0.01  # the left edge: what is below, down to nothing at all, is shown there
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
TITLES = {"time": "time and CPU, mmcache / stock (less is better)", "work": "work and errors, mmcache / stock (less is"
          " better)", "reuse": "tokens reused of the best possible (more is better)"}  # fmt: skip
STOCK, BETTER, WORSE = "#7a7a7a", "#1a7f5a", "#c0562b"


def all_committed() -> dict[str, Loaded]:
    """The committed result of every benchmark that has a row, by name; none where it was not measured."""
    names = dict.fromkeys(row.benchmark for row in ROWS)
    return {name: committed(name) for name in names if (FOLDER / f"{name}.json").exists()}


def table(results: Mapping[str, Loaded], in_readme: bool = False) -> str:
    """The table in Markdown, with the machines that it was measured on; empty without a row."""
    wanted = [row for row in ROWS if row.benchmark in results and (row.in_readme or not in_readme)]
    lines = [line for row in wanted if (line := row.line(results[row.benchmark]))]
    if not lines:
        return ""
    machines = machines_of({row.benchmark: results[row.benchmark] for row in wanted})
    note = fill(f"Measured on {machines}. {NOTE}", WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(["| what | stock | mmcache | command |", "|---|---|---|---|", *lines, "", note, ""])


def machines_of(results: Mapping[str, Loaded]) -> str:
    """The machines of results, each once: cores, the processors that had so many, and vLLM's version."""
    seen: dict[tuple[str, str], set[str]] = {}
    for found in results.values():
        name, cores = machine_of(found)
        seen.setdefault((cores, found["vllm"]), set()).add(name)
    return "; ".join(
        f"{cores} of {' or '.join(sorted(names))}, vLLM {version}" for (cores, version), names in sorted(seen.items())
    )


def machine_of(found: Loaded) -> tuple[str, str]:
    """The processor of a result without its trade marks, and its cores."""
    name, _, cores = found["machine"].rpartition(", ")  # as results.py writes it
    return re.sub(r"\((R|TM)\)|\s+(CPU|Processor)\b", "", name), cores


def by_machine(results: Mapping[str, Loaded]) -> str:
    """A list in Markdown of machines, each with the benchmarks that were measured on it."""
    named: dict[str, list[str]] = {}
    for name, found in results.items():
        named.setdefault(" with ".join(machine_of(found)), []).append(f"`{name}`")
    items = (f"- {machine}: {', '.join(names)}." for machine, names in sorted(named.items()))
    return "\n".join(fill(item, WIDTH, subsequent_indent="  ") for item in items) + "\n"


def between_marks(text: str, begin: str, content: str) -> str:
    """A page's text with `content` between the marks `begin` and END. Raises: ValueError where it lacks them."""
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page lacks the marks {begin.strip()} and {END.strip()}")
    return before + begin + content + END + after


def pages() -> dict[Path, str]:
    """What stands between the marks of each page, from the committed results."""
    results = all_committed()
    readme = table(results, in_readme=True) + LINKS
    return {ROOT / "README.md": readme, ROOT / "benchmarks" / "README.md": table(results) + "\n" + by_machine(results)}


def points_of(results: Mapping[str, Loaded]) -> list[Point]:
    return [point for row in ROWS if row.benchmark in results for point in row.points(results[row.benchmark])]


def points_in_readme(results: Mapping[str, Loaded]) -> list[Point]:
    """One bar for each row of the README that is a time: of several families or cases the worst."""
    rows = [row for row in ROWS if row.in_readme and row.group == "time" and row.benchmark in results]
    found = [list(row.points(results[row.benchmark])) for row in rows]
    return [max(points, key=lambda point: point.mmcache / point.stock) for points in found if points]


def digest(points: Iterable[Point]) -> str:
    """Names what a plot shows, whatever version of matplotlib drew it."""
    return hashlib.sha256(json.dumps(list(points)).encode()).hexdigest()


def draw(points: list[Point], path: Path) -> None:
    """Write a plot of 32 colours, which is a third of the size, with the digest of its points as a text in the file."""
    from matplotlib.figure import Figure

    groups = {name: members for name in TITLES if (members := [point for point in points if point.group == name])}
    if not groups:
        raise ValueError("nothing to plot: no result has a row with both sides")
    heights = [len(members) + 2.5 for members in groups.values()]
    figure = Figure(figsize=(10, 0.2 * sum(heights)), dpi=90, layout="constrained")
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (name, members) in zip(panels, groups.items(), strict=True):
        (shares if name == "reuse" else bars)(panel, members)
        panel.set_title(TITLES[name], fontsize=9, loc="left")
        panel.set_yticks(range(len(members)), [point.label for point in members], fontsize=8)
        panel.set_ylim(len(members) - 0.4, -0.6)
        panel.tick_params(axis="x", labelsize=8)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.grid(axis="x", linewidth=0.3)
        panel.set_axisbelow(True)
    drawn, info = io.BytesIO(), PngInfo()
    figure.savefig(drawn)
    info.add_text(KEY, digest(points))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(drawn).convert("RGB").quantize(32).save(path, optimize=True, pnginfo=info)


def bars(panel: Any, points: list[Point]) -> None:
    """One bar a row, from 1 to the ratio, on a log axis."""
    ratios = [point.mmcache / point.stock if point.stock else 1.0 for point in points]
    shown = [max(ratio, LEAST) for ratio in ratios]
    colours = [BETTER if ratio <= 1 else WORSE for ratio in ratios]
    drawn = panel.barh(range(len(points)), [end - 1 for end in shown], left=1, height=0.7, color=colours)
    said = ["0" if ratio == 0 else f"{ratio:.2f}" if ratio >= LEAST else f"{ratio:.0e}" for ratio in ratios]
    panel.bar_label(drawn, said, padding=3, fontsize=7)
    panel.axvline(1, color=STOCK, linewidth=1)
    panel.set_xscale("log")
    panel.set_xlim(LEAST / 2, max(2, *ratios) * 1.3)
    panel.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    panel.minorticks_off()


def shares(panel: Any, points: list[Point]) -> None:
    """Two marks a row: stock's share and ours, joined."""
    rows, stock, ours = range(len(points)), [point.stock for point in points], [point.mmcache for point in points]
    panel.hlines(rows, stock, ours, color=BETTER, linewidth=2, zorder=1)
    panel.scatter(stock, rows, color=STOCK, s=28, zorder=2, label="stock")
    panel.scatter(ours, rows, color=BETTER, s=28, marker="D", zorder=3, label="mmcache")
    panel.legend(fontsize=8, loc="lower left", frameon=False)
    panel.set_xlim(-0.03, 1.03)


def main() -> None:
    """Print the table, or write the pages and the plots."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.summary", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into the pages, and draw the plots")
    if not parser.parse_args().write:
        print(table(all_committed()))
        return
    for path, content in pages().items():
        path.write_text(between_marks(path.read_text(), BEGIN, content))
    draw(points_of(all_committed()), PLOT)
    draw(points_in_readme(all_committed()), IN_README)


if __name__ == "__main__":
    main()
