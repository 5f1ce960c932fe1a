# SPDX-License-Identifier: Apache-2.0
"""The tables and the plot of docs/features.md: which tier is faster than the vision tower, for which model and picture.

python -m benchmarks.feature_costs.page          # print the tables
python -m benchmarks.feature_costs.page --write  # put them into the page, and draw docs/feature_costs.png
"""

import argparse
import textwrap
from dataclasses import replace
from typing import Any

from benchmarks.feature_costs.model import Inputs, Package, inputs_with, measured_here
from benchmarks.results import ROOT
from benchmarks.summary import between_marks

PAGE = ROOT / "docs" / "features.md"
BEGIN = "<!-- made by python -m benchmarks.feature_costs.page -->\n"
SHOWN = "H200"  # the GPU of the long table
SMALLER = 0.95  # of the bytes, or it is no compression
MIB = 1024**2


def text(found: dict[str, Any]) -> str:
    """What the page says of a result: verdicts, the long table, where the numbers are from, compression."""
    inputs = inputs_with(found["measured"])
    parts = (verdicts(inputs), loads(inputs, SHOWN), sources(inputs, found), compression(found))
    return "\n".join(parts)


def verdicts(inputs: Inputs) -> str:
    """By tier and GPU, from which picture on loading is faster than the tower."""
    gpus = list(inputs.said["gpus"])
    lines = [f"| loading from | {' | '.join(gpus)} |", "|---" * (1 + len(gpus)) + "|"]
    for tier in inputs.said["tiers"]:
        lines.append(f"| {tier} | {' | '.join(verdict(inputs, tier, gpu) for gpu in gpus)} |")
    return "\n".join(["Loading is faster than the tower:", "", *lines, ""])


def verdict(inputs: Inputs, tier: str, gpu: str) -> str:
    """For each model; models of which the same is true are said together."""
    said: dict[str, list[str]] = {}
    for model in inputs.said["models"]:
        own = [package for package in inputs.packages() if package.model == model]
        wins = [package for package in own if inputs.break_even(tier, package, gpu) >= 1]
        what = "always" if len(wins) == len(own) else f"from {wins[0].picture}" if wins else "never"
        said.setdefault(what, []).append(model.removeprefix("Qwen3-VL-").removesuffix(" 31B"))
    if len(said) == 1:
        return next(iter(said))
    return "; ".join(f"{', '.join(models)} {what}" for what, models in said.items())


def loads(inputs: Inputs, gpu: str) -> str:
    """Each package: its size, the tower's time, and of each tier the time to load and the break-even."""
    tiers = list(inputs.said["tiers"])
    columns = ["model", "picture", "tokens", "MiB", "tower", *tiers]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    alike: dict[Package, list[str]] = {}
    for package in inputs.packages():
        alike.setdefault(replace(package, model=""), []).append(package.model)
    for package, models in alike.items():
        cells = [
            ", ".join(models), package.picture, f"{package.num_tokens:,}", f"{package.num_bytes / MIB:.0f}",
            f"{milliseconds(inputs.tower_s(package.flops, gpu))} ms",
            *(cell(inputs, tier, package, gpu) for tier in tiers),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    said = (
        f"On an {gpu}: milliseconds to load, and in brackets the tower's time by that; in bold where loading is faster."
    )
    return "\n".join([said, "", *lines, ""])


def cell(inputs: Inputs, tier: str, package: Package, gpu: str) -> str:
    times = inputs.break_even(tier, package, gpu)
    digits = 0 if times >= 10 else 1 if times >= 1.05 else 2
    shown = f"{milliseconds(inputs.load_s(tier, package.num_bytes, gpu))} ({times:.{digits}f})"
    return f"**{shown}**" if times >= 1 else shown


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}" if seconds < 0.01 else f"{1000 * seconds:.0f}"


def sources(inputs: Inputs, found: dict[str, Any]) -> str:
    """Which numbers were measured, and which are from elsewhere."""
    here = ", ".join(f"{name.replace('_', ' ')} {rate:.2f}" for name, rate in found["measured"].items())
    used = ", ".join(f"{name} {inputs.rate(name, SHOWN) / 1e9:.1f}" for name in inputs.said["rates"])
    towers = ", ".join(
        f"{name} {one['seconds']:.1f} s ({one['counted_flops'] / one['seconds'] / 1e12:.2f} TFLOPS)"
        for name, one in found["tower"].items()
    )
    return paragraphs(
        f"Used, in GB/s: {used}. `benchmarks/feature_costs/inputs.json` says where each is from. A load's stages are"
        " added up; one connection reads from Valkey. The tower's time on a GPU is derived, not measured: its matrix"
        f" products by {inputs.said['efficiency']['value']:.0%} of the data sheet's rate. torch counts the same on the"
        " real class.",
        f"Measured (commit {found['commit']}, {found['machine']}, no GPU, others at work), in GB/s: {here}; and the"
        f" tower of Qwen3-VL-8B, random weights, bfloat16, on one core: {towers}.",
    )


def compression(found: dict[str, Any]) -> str:
    """The best codec in a line: whether its smaller packages are loaded sooner."""
    inputs = inputs_with(found["measured"])

    def share(codec: str, medium: str, cores: int = 1) -> float:
        one = found["compression"][codec]
        return float(one["ratio"] + inputs.rate(medium, SHOWN) / 1e9 / one["unpack_gb_s"] / cores)

    smaller = [codec for codec, one in found["compression"].items() if one["ratio"] < SMALLER]
    best = min(smaller, key=lambda codec: share(codec, "10 GbE"))
    ratio, unpack_gb_s = (found["compression"][best][what] for what in ("ratio", "unpack_gb_s"))
    return paragraphs(
        f"Lossless compression {'pays' if share(best, '10 GbE') < 1 else 'does not pay'}:"
        f" {best}, the best of {len(smaller)} ways that make that tower's features smaller, leaves {ratio:.2f} of the"
        f" bytes and gives them back at {unpack_gb_s:.1f} GB/s on one core. A read over 10 GbE then takes"
        f" {share(best, '10 GbE'):.2f} of its time, one from NVMe {share(best, 'NVMe'):.1f}; on four cores it would be"
        f" {share(best, '10 GbE', 4):.2f} and {share(best, 'NVMe', 4):.1f}."
    )


def paragraphs(*texts: str) -> str:
    """Lines of the page's width."""
    return "\n\n".join(textwrap.fill(one, 120, break_long_words=False, break_on_hyphens=False) for one in texts) + "\n"


def written(page: str) -> str:
    """The page's text with today's tables between the marks."""
    return between_marks(page, BEGIN, text(measured_here()))


def main() -> None:
    """Print the tables, or write them and the plot."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.feature_costs.page", description=__doc__)
    parser.add_argument("--write", action="store_true", help="into docs/features.md, and docs/feature_costs.png")
    if parser.parse_args().write:
        from benchmarks.feature_costs import plot  # matplotlib

        PAGE.write_text(written(PAGE.read_text()))
        plot.draw(measured_here(), plot.PLOT)
    else:
        print(text(measured_here()))


if __name__ == "__main__":
    main()
