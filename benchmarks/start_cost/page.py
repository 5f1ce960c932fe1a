# SPDX-License-Identifier: Apache-2.0
"""The table of start costs in docs/benchmarks.md, made from the committed result.

python -m benchmarks.start_cost.page          # print it
python -m benchmarks.start_cost.page --write  # put it into the page; a test compares
"""

import argparse
import json
from typing import Any

from benchmarks.start_cost.run import COMMITTED
from benchmarks.summary import ROOT, between_marks

PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN = "<!-- made by python -m benchmarks.start_cost.page -->\n"
COLUMNS = (
    "process", "measured", "stock", "with the plugin", "difference (range)", "beside imports (range)",
    "the plugin's own", "functions / rooms / modules / extra",
)  # fmt: skip


def table(measured: dict[str, Any]) -> str:
    """One row for each process and measurement, and what was measured."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    first = next(iter(measured.values()))
    for process in first["processes"]:
        lines += [row(process, name, found["processes"][process]) for name, found in measured.items()]
    what = "; ".join(
        f"{name}: commit {found['commit']}, {found['machine']}, {found['pairs']} pairs"
        for name, found in measured.items()
    )
    return "\n".join([*lines, "", f"{what[0].upper()}{what[1:]}.", ""])


def row(process: str, name: str, found: dict[str, Any]) -> str:
    """One process in one measurement: seconds of CPU, and the modules of the plugin and beside it."""
    whole = f"{found['cpu_s_stock']:.2f} s | {found['cpu_s_plugin']:.2f} s"
    differences = f"{ranged(found, 'difference')} | {ranged(found, 'difference_beside_imports')}"
    own = f"{found['functions_cpu_s']:.3f} / {found['rooms_cpu_s']:.3f} / {found['own_modules_cpu_s']:.3f} "
    own += f"({found['own_modules']:.0f}) / {found['extra_modules_cpu_s']:.3f} ({found['extra_modules']:.0f})"
    start = f"{process.replace('_', ' ')} | {name} | {whole}"
    return f"| {start} | {differences} | {found['plugin_own_cpu_s']:.2f} s | {own} |"


def ranged(found: dict[str, Any], what: str) -> str:
    least, most = found[f"{what}_range_s"]
    return f"{found[f'{what}_s']:.2f} s ({least:.2f} to {most:.2f})"


def written(text: str) -> str:
    """The page's text with today's table between the marks."""
    return between_marks(text, BEGIN, table(json.loads(COMMITTED.read_text())["measured"]))


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start_cost.page", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into docs/benchmarks.md")
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print(table(json.loads(COMMITTED.read_text())["measured"]))


if __name__ == "__main__":
    main()
