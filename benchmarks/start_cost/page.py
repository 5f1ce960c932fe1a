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
COLUMNS = ("process", "stock", "with the plugin", "difference (range)", "the plugin's own")


def table(measured: dict[str, Any]) -> str:
    """One row for each process in the last measurement, and what was measured."""
    found = list(measured.values())[-1]
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [row(process, costs) for process, costs in found["processes"].items()]
    return "\n".join([*lines, "", f"Commit {found['commit']}, {found['machine']}, {found['pairs']} pairs.", ""])


def row(process: str, found: dict[str, Any]) -> str:
    """One process: seconds of CPU."""
    whole = f"{found['cpu_s_stock']:.2f} s | {found['cpu_s_plugin']:.2f} s | {ranged(found, 'difference')}"
    return f"| {process.replace('_', ' ')} | {whole} | {found['plugin_own_cpu_s']:.2f} s |"


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
