# SPDX-License-Identifier: Apache-2.0
"""How large the store of features should be, as a picture; matplotlib, which nothing else of this package needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_mmcache.base.errors import RecordsError
from vllm_mmcache.traffic import report
from vllm_mmcache.traffic.page import MARGIN, PLOT_TITLE


def figure_class() -> Any:
    """Matplotlib's Figure. Raises: RecordsError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise RecordsError("--png needs matplotlib: pip install matplotlib; --html has the same plot") from error
    return Figure


def write(path: Path, curve: Sequence[tuple[float, float]], chosen_bytes: float) -> None:
    """Write the plot of the page as PNG.

    curve: the size of a store in bytes, rising, and the share of features that it lacks. chosen_bytes is marked where
    it lies in the plot. Raises: RecordsError without matplotlib, or where it can't be written.
    """
    most_bytes = curve[-1][0] * MARGIN
    figure = figure_class()(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    sizes, shares = zip(*curve, (most_bytes, curve[-1][1]), strict=True)
    axes.step(sizes, shares, where="post")
    if chosen_bytes <= most_bytes:
        axes.axvline(chosen_bytes, color="black", linestyle="--", linewidth=1)
        axes.annotate(" --features", (chosen_bytes, 1), va="top")
    axes.set(xlim=(0, most_bytes), ylim=(0, 1), xlabel="size of the store")
    axes.set_title(PLOT_TITLE, fontsize=11)
    axes.xaxis.set_major_formatter(lambda size, _: report.shown(size))
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.grid(linewidth=0.3)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise RecordsError(f"--png {path} can't be written: {error.strerror}") from error
