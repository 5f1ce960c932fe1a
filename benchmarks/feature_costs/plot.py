# SPDX-License-Identifier: Apache-2.0
"""Loads and towers as one picture: seconds by the size of a package. What was measured is marked."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.feature_costs.model import inputs_with
from benchmarks.plot import new_figure, save
from benchmarks.results import ROOT

PLOT = ROOT / "docs" / "feature_costs.png"
KEY = "Costs"  # of the text in the file that says what is shown
MODEL = "Qwen3-VL-8B"
GPU = "H200"  # whose bus the loads use
MIB = 1024**2
SIZES = np.geomspace(8 * MIB, 300 * MIB, 50)


def digest(found: dict[str, Any]) -> str:
    """Names what a plot shows, whatever version of matplotlib drew it."""
    inputs = inputs_with(found["measured"])
    shown = [dict(inputs.said), found["measured"], found["tower"]]
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


def draw(found: dict[str, Any], path: Path) -> None:
    """Write the plot of a result as a PNG."""
    inputs = inputs_with(found["measured"])
    figure = new_figure(6.5)
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlabel=f"MiB of features of one image ({MODEL})", ylabel="milliseconds")
    for number, tier in enumerate(inputs.said["tiers"]):
        times = [1000 * inputs.load_s(tier, int(size), GPU) for size in SIZES]
        axes.plot(SIZES / MIB, times, color=f"C{number}", linewidth=1.8, label=f"load: {tier}")
    packages = [package for package in inputs.packages() if package.model == MODEL]
    for gpu, marker in zip(inputs.said["gpus"], "osv^", strict=True):
        sizes = [package.num_bytes / MIB for package in packages]
        times = [1000 * inputs.tower_s(package.flops, gpu) for package in packages]
        axes.plot(sizes, times, color="#777777", linestyle="--", marker=marker, markersize=4, linewidth=1)
        lift = -9 if gpu == "L40S" else 0  # which is next to the A100
        place = {"xytext": (6, lift), "textcoords": "offset points"}
        axes.annotate(f"tower, {gpu}", (sizes[-1], times[-1]), fontsize=8, **place)
    show_measured(axes, found)
    for package in packages:
        axes.axvline(package.num_bytes / MIB, color="#dddddd", linewidth=0.8, zorder=0)
        axes.annotate(package.picture, (package.num_bytes / MIB, 0.2), fontsize=8, ha="center", color="#555555")
    ticks = [8, 16, 32, 64, 128, 256]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(7, 400)
    axes.grid(axis="y", linewidth=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.set_title(
        f"A tier is worth asking where its line is below the tower's (loads over the bus of an {GPU})",
        fontsize=9,
        loc="left",
    )
    save(figure, path, {KEY: digest(found)}, colours=256)


def show_measured(axes: Any, found: dict[str, Any]) -> None:
    """Black diamonds: loads on this machine (read and BLAKE3 on one thread), and the tower on its CPU."""
    rates = found["measured"]
    num_bytes = found["options"]["mebibytes"] * MIB
    stages = {
        "page cache": ("read_warm", "blake3"), "disk": ("read_cold", "blake3"), "Valkey": ("valkey", "blake3"),
        "RAM to RAM": ("memcpy",),
    }  # fmt: skip
    points = {name: (num_bytes, sum(num_bytes / rates[rate] / 1e9 for rate in chain)) for name, chain in stages.items()}
    points |= {f"tower, CPU core, {name}": (one["num_bytes"], one["seconds"]) for name, one in found["tower"].items()}
    for number, (name, (size, seconds)) in enumerate(points.items()):
        label = "measured here, no GPU" if number == 0 else None
        axes.scatter(size / MIB, 1000 * seconds, color="black", marker="D", s=26, zorder=4, label=label)
        place = {"xytext": (-6, -3), "ha": "right"} if name == "disk" else {"xytext": (6, -3), "ha": "left"}
        axes.annotate(name, (size / MIB, 1000 * seconds), textcoords="offset points", fontsize=7, **place)
