# SPDX-License-Identifier: Apache-2.0
"""The measurements as a picture: mmcache by stock, row by row, and the shares of tokens that were reused."""

import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from benchmarks.forms import Loaded, Point
from benchmarks.results import ROOT
from benchmarks.rows import ROWS

PLOT, IN_README = ROOT / "docs" / "benchmarks.png", ROOT / "docs" / "readme.png"
KEY = "Points"  # of the text in the file that says what is shown
LEAST = 0.01  # the left edge: what is below, down to nothing at all, is shown there
TITLES = {"time": "time and CPU, mmcache / stock", "work": "work and errors, mmcache / stock"}
STOCK, BETTER, WORSE = "#7a7a7a", "#1a7f5a", "#c0562b"


def points_of(results: Mapping[str, Loaded]) -> list[Point]:
    return [point for row in ROWS if row.benchmark in results for point in row.points(results[row.benchmark])]


def points_in_readme(results: Mapping[str, Loaded]) -> list[Point]:
    """One bar for each row of the README that is a time: of several families or cases the worst."""
    rows = [row for row in ROWS if row.in_readme and row.form.group == "time" and row.benchmark in results]
    found = [list(row.points(results[row.benchmark])) for row in rows]
    return [max(points, key=lambda point: point.mmcache / point.stock) for points in found if points]


def digest(points: Iterable[Point]) -> str:
    """Names what a plot shows, whatever version of matplotlib drew it."""
    return hashlib.sha256(json.dumps(list(points)).encode()).hexdigest()


def draw(points: list[Point], path: Path) -> None:
    """Write a plot of 32 colours, which is a third of the size, with the digest of its points as a text in the file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = {name: [point for point in points if point.group == name] for name in (*TITLES, "reuse")}
    groups = {name: members for name, members in groups.items() if members}
    if not groups:
        raise ValueError("nothing to plot: no result has a row with both sides")
    heights = [len(members) + 2.5 for members in groups.values()]
    figure = Figure(figsize=(10, 0.2 * sum(heights)), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (name, members) in zip(panels, groups.items(), strict=True):
        show_shares(panel, members) if name == "reuse" else show_ratios(panel, members, TITLES[name])
        panel.set_yticks(range(len(members)), [point.label for point in members], fontsize=8)
        panel.set_ylim(len(members) - 0.4, -0.6)
        panel.tick_params(axis="x", labelsize=8)
        panel.spines[["top", "right", "left"]].set_visible(False)
    drawn, info = io.BytesIO(), PngInfo()
    figure.savefig(drawn)
    info.add_text(KEY, digest(points))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(drawn).convert("RGB").quantize(32).save(path, optimize=True, pnginfo=info)


def show_ratios(panel: Any, points: list[Point], title: str) -> None:
    """One bar a row, from 1 to the ratio, on a log axis; less is better."""
    ratios = [point.mmcache / point.stock if point.stock else 1.0 for point in points]
    panel.set_xscale("log")
    for row, ratio in enumerate(ratios):
        shown = max(ratio, LEAST)
        panel.barh(row, shown - 1, left=1, height=0.7, color=BETTER if ratio <= 1 else WORSE)
        panel.annotate(
            label_of(ratio), (shown, row), xytext=(-3 if ratio <= 1 else 3, 0), textcoords="offset points",
            ha="right" if ratio <= 1 else "left", va="center", fontsize=7,
        )  # fmt: skip
    panel.axvline(1, color=STOCK, linewidth=1)
    panel.set_xlim(LEAST / 2, max(2, *ratios) * 1.3)
    ticks = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.grid(axis="x", linewidth=0.3)
    panel.set_axisbelow(True)
    panel.set_title(f"{title} (less is better)", fontsize=9, loc="left")


def label_of(ratio: float) -> str:
    if ratio == 0:
        return "0"
    return f"{ratio:.2f}" if ratio >= LEAST else f"{ratio:.0e}"


def show_shares(panel: Any, points: list[Point]) -> None:
    """Two marks a row: stock's share and ours, joined."""
    for row, point in enumerate(points):
        panel.plot([point.stock, point.mmcache], [row, row], color=BETTER, linewidth=2, zorder=1)
    rows = range(len(points))
    stock = panel.scatter([point.stock for point in points], rows, color=STOCK, s=28, zorder=2)
    ours = panel.scatter([point.mmcache for point in points], rows, color=BETTER, s=28, marker="D", zorder=3)
    panel.legend([stock, ours], ["stock", "mmcache"], fontsize=8, loc="lower left", frameon=False)
    panel.set_xlim(-0.03, 1.03)
    panel.grid(axis="x", linewidth=0.3)
    panel.set_axisbelow(True)
    panel.set_title("tokens reused of the best possible (more is better)", fontsize=9, loc="left")
