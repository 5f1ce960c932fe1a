# SPDX-License-Identifier: Apache-2.0
"""The table of measurements, made from results: the committed ones for the pages, others for `make bench`.

python -m benchmarks.summary          # print the whole table
python -m benchmarks.summary --write  # write README.md (a few rows), benchmarks/README.md (all) and the plot
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from benchmarks.forms import Loaded
from benchmarks.results import FOLDER, ROOT, committed
from benchmarks.rows import ROWS

BEGIN, END = "<!-- made by python -m benchmarks.summary -->\n", "<!-- end -->\n"
LINKS = "[All rows, and how to repeat and read them](benchmarks/README.md); [as a plot](docs/benchmarks.png).\n"


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
    shown = {row.benchmark: results[row.benchmark] for row in wanted}
    note = f"Measured on {machines_of(shown)}. Tiny random models: ratios and exactness matter, not milliseconds."
    return "\n".join(["| what | stock | mmcache | command |", "|---|---|---|---|", *lines, "", note, ""])


def machines_of(results: Mapping[str, Loaded]) -> str:
    """The machines of results, each once: cores, the processors that had so many, and vLLM's version."""
    seen: dict[tuple[str, str], set[str]] = {}
    for found in results.values():
        name, _, cores = found["machine"].rpartition(", ")  # as machine.py writes it
        seen.setdefault((cores, found["vllm"]), set()).add(re.sub(r"\((R|TM)\)|\s+(CPU|Processor)\b", "", name))
    return "; ".join(
        f"{cores} of {' or '.join(sorted(names))}, vLLM {version}" for (cores, version), names in sorted(seen.items())
    )


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
    return {
        ROOT / "README.md": table(results, in_readme=True) + LINKS,
        ROOT / "benchmarks" / "README.md": table(results),
    }


def main() -> None:
    """Print the table, or write the pages and the plot."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.summary", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into the pages, and draw the plot")
    if not parser.parse_args().write:
        print(table(all_committed()))
        return
    from benchmarks import plot

    for path, content in pages().items():
        path.write_text(between_marks(path.read_text(), BEGIN, content))
    plot.draw(plot.points_of(all_committed()), plot.PLOT)
    plot.draw(plot.points_in_readme(all_committed()), plot.IN_README)


if __name__ == "__main__":
    main()
