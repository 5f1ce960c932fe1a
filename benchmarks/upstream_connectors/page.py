# SPDX-License-Identifier: Apache-2.0
"""The table of docs/features.md that sets the store beside vLLM's own connectors, made from the committed result.

python -m benchmarks.upstream_connectors.page          # print it
python -m benchmarks.upstream_connectors.page --write  # put it into the page; a test compares
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.summary import ROOT, between_marks
from benchmarks.upstream_connectors.compare import SIDES

COMMITTED = Path(__file__).parent / "results" / "upstream_connectors.json"
PAGE = ROOT / "docs" / "features.md"
BEGIN = "<!-- made by python -m benchmarks.upstream_connectors.page -->\n"
SHOWN = {"stock": "vLLM alone", "mmcache": "this store"}
COLUMNS = (
    "", "images first asked about", "asked about again, after they left vLLM's own cache", "after a restart",
    "one image after new weights", "a known image beside a new one, memory full",
)  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """Runs of the tower of each side, and the median time of a question."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for side in SIDES:
        one = found[side]
        cells = [
            f"{one[name]['tower_runs']} ({one[name]['median_s']:.2f} s)" for name in ("first", "rotation", "restart")
        ]
        faults = one.get("faults")
        ends = faults["known_beside_new"].partition(" for ")[0] if faults else ""  # without the image's name
        cells += [str(faults["tower_runs_after_new_weights"]) if faults else "", ends]
        lines.append(f"| {SHOWN.get(side, side)} | {' | '.join(cells)} |")
    what = f"{found['options']['images']} images, commit {found['commit']}, {found['machine']}"
    return "\n".join(["Runs of the tower, and the median time of a question:", "", *lines, "", f"{what}.", ""])


def written(page: str) -> str:
    """The page's text with today's table between the marks."""
    return between_marks(page, BEGIN, table(json.loads(COMMITTED.read_text())))


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.upstream_connectors.page", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into docs/features.md")
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print(table(json.loads(COMMITTED.read_text())))


if __name__ == "__main__":
    main()
