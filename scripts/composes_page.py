# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's features with the rooms and writes docs/composes.md from what came of it.

    python -m scripts.composes_page [--run FEATURE ... | --run] [--engine v1]

`--run` runs those features (without names all) and records them in docs/composes.json; without it the page alone is
written. The features are those of tests/composes/features.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from scripts.matrix import REPO, commit
from tests.composes.features import BY_NAME, FEATURES, ROOMS, Feature
from tests.composes.running import judge, run

USUAL = ("properties", "system-out", "system-err")  # of a test that passed, in JUnit's format
RESULTS = REPO / "docs" / "composes.json"
PAGE = REPO / "docs" / "composes.md"
ENGINES = {"v1": "model runner V1", "v2": "model runner V2", "v2-async": "model runner V2, async scheduling"}

HEAD = """# What it composes with

<!-- written by scripts/composes_page.py from composes.json; don't edit -->

The rooms of this plugin beside the features of vLLM 0.32, each tried on the CPU with tiny models. A row is a run of
`python -m scripts.composes_page --run NAME`, or of the tests that it names; as a test,
`TEST_MATRIX=1 python -m pytest tests/composes -k NAME`.

- **exact**: the room was on, and what it reuses was reused: the same question again, a second question about the same
  picture, and the picture's features after everything else was forgotten. All answers had the tokens and
  log-probabilities of the same engine's cold run (1e-3 in float32). Another picture in the same place gave another
  answer, which the comparison noticed. `image_spans`: the answer also had the log-probabilities of Transformers.
- **on**: it was on, and answers were exact, but the run does not use it: questions are put to the engine, past the API
  server. The rows of deployments have questions over HTTP.
- **off**, with what the engine says of it: answers were exact, and nothing was reused by that room.
- **-**: the room has nothing to do with that model.
- **not runnable here**: vLLM ends with that error on the CPU. It says nothing of other platforms.
"""


@dataclass(frozen=True)
class Row:
    """One run of a feature."""

    feature: str
    engine: str
    rooms: dict[str, str] = field(default_factory=dict)
    error: str = ""  # as expected: vLLM can't do this here
    failed: str = ""  # not as expected
    delta: float = 0.0  # to a cold run
    from_transformers: float | None = None
    reused: dict[str, int] = field(default_factory=dict)
    accepted: int = 0
    date: str = ""
    commit: str = ""

    @property
    def place(self) -> tuple[int, int]:
        return list(ENGINES).index(self.engine), list(BY_NAME).index(self.feature)


def read() -> list[Row]:
    """The committed rows."""
    return [Row(**row) for row in json.loads(RESULTS.read_text())] if RESULTS.exists() else []


def record_tests(features: Sequence[Feature], engine: str, scratch: Path) -> Iterator[Row]:
    """Run the tests that show these features, in one pytest: their fixtures are servers, too."""
    report = scratch / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", *(one.shown_by for one in features)]
    environ = os.environ | {"TEST_MATRIX": "1", "TEST_ENGINE": engine}
    done = subprocess.run(command, cwd=REPO, env=environ, check=False)
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    for feature in features:
        file, _, test = feature.shown_by.partition("::")
        module = file.removesuffix(".py").replace("/", ".")
        mine = [one for one in cases if one.get("classname") == module and test in ("", one.get("name"))]
        bad = [f"{one.get('name')}: {child.tag}" for one in mine for child in one if child.tag not in USUAL]
        rooms = {room: feature.expected(engine).get(room, "on") for room in ROOMS if room in feature.uses}
        why = "" if mine and not bad else f"pytest ended with {done.returncode}, of {len(mine)} tests: {bad}"
        yield Row(feature.name, engine, rooms=rooms, failed=why, **made())


def made() -> dict[str, str]:
    return {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": commit((RESULTS, PAGE))}


def record(feature: Feature, engine: str, scratch: Path) -> Row:
    """Run a feature in an engine."""
    about: dict[str, Any] = {"feature": feature.name, "engine": engine, **made()}
    result = run(feature, scratch, engine)
    try:
        delta = judge(feature, result, engine)
    except AssertionError as error:
        return Row(**about, failed=str(error)[:600] or "an assertion")
    if result["stage"] != "end":
        return Row(**about, error=f"{result['stage']}: {result['error']}"[:300])
    far = result["from_transformers"]
    numbers = {
        "from_transformers": None if far is None else float(f"{far:.1e}"),
        "reused": result["reused"],
        "accepted": result["accepted"],
        "delta": float(f"{delta:.1e}"),
    }
    return Row(**about, rooms={room: result["rooms"][room] for room in ROOMS}, **numbers)


def cell(room: str, row: Row) -> str:
    """What the page says of a room. A question to an engine goes past the rooms of an API server."""
    feature = BY_NAME[row.feature]
    if room not in row.rooms:
        return "not looked at"
    state, _, reason = row.rooms[room].partition(": ")
    # A cold run of an engine would be wrong, too; servers are compared with stock, other tests with Transformers.
    is_used = room in feature.uses and (
        room != "image_spans" or bool(feature.shown_by) or row.from_transformers is not None
    )
    return {"on": "exact" if is_used else "on", "unneeded": "-"}.get(state) or f"{state}: {reason}"


def page(rows: list[Row]) -> str:
    """The whole page: a table for each engine, then where a second question is answered from."""
    parts = [HEAD.rstrip()]
    for engine, about in ENGINES.items():
        here = [row for row in rows if row.engine == engine]
        if not here:
            continue
        parts.append(f"\n## {about[0].upper()}{about[1:]}\n")
        parts.append("| feature | name | model | " + " | ".join(f"`{room}`" for room in ROOMS) + " |")
        parts.append("|---" * (3 + len(ROOMS)) + "|")
        for row in here:
            feature = BY_NAME[row.feature]
            name = f"`{row.feature}`"
            name += f", [test](../{feature.shown_by.partition('::')[0]})" if feature.shown_by else ""
            start = f"| {feature.title} | {name} | {feature.family} | "
            if row.failed or row.error:
                why = f"**failed**: {row.failed}" if row.failed else f"not runnable here: `{short(row.error)}`"
                parts.append(start + one_line(why) + " |" * len(ROOMS))
            else:
                parts.append(start + " | ".join(cell(room, row) for room in ROOMS) + " |")
    known = {row.feature for row in rows}
    missing = [f"- {feature.title} (`{feature.name}`)" for feature in FEATURES if feature.name not in known]
    if missing:
        parts.append("\n## Not run\n\n" + "\n".join(missing))
    notes = [f"- {feature.title}: {feature.note}" for feature in FEATURES if feature.note]
    if notes:
        parts.append("\n## Notes\n\n" + "\n".join(notes))
    parts.append("\n## Reused\n\n" + REUSED)
    for row in rows:
        if row.reused:
            again, second, other = (row.reused[name] for name in ("again", "second", "other"))
            far = "-" if row.from_transformers is None else f"{row.from_transformers:.0e}"
            run = f"{row.accepted or '-'} | {row.delta:.0e} | {far} | {row.date} | {row.commit} |"
            parts.append(f"| `{row.feature}` | {row.engine} | {again} | {second} | {other} | {run}")
    return "\n".join(parts) + "\n"


REUSED = """Tokens of the prompt that were not computed: the same question again, a second question about the same
picture, the first question about another picture in the same place, which shares the text before it; tokens of drafts
that were accepted; the largest difference of a log-probability to a cold run, and to Transformers.

| name | engine | again | second question | other picture | accepted | cold | Transformers | date | commit |
|---|---|---|---|---|---|---|---|---|---|"""


def one_line(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def short(error: str) -> str:
    return one_line(error.partition(": ")[2])[:160].replace("`", "'")


def runs(features: Sequence[Feature], engine: str, scratch: Path) -> Iterator[Row]:
    """Those in engines one after the other, then the tests, together where they are about the same engine."""
    for feature in features:
        if not feature.shown_by:
            yield record(feature, engine, scratch)
    by_tests: dict[str, list[Feature]] = {}
    for feature in features:
        if feature.shown_by:
            by_tests.setdefault(feature.tested_on or engine, []).append(feature)
    for of_tests, group in by_tests.items():
        yield from record_tests(group, of_tests, scratch)


def main() -> int:
    """Run what was asked for, write the page; 1 where something was not as expected."""
    parser = argparse.ArgumentParser(prog="python -m scripts.composes_page", description=__doc__)
    parser.add_argument("--run", nargs="*", choices=BY_NAME, help="names; without any, all")
    parser.add_argument("--engine", choices=ENGINES, default="v1")
    parser.add_argument("--scratch", type=Path, help="keep models here")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the engine under way is ended, too
    rows = {row.place: row for row in read() if row.feature in BY_NAME}
    with tempfile.TemporaryDirectory() as folder:
        scratch = options.scratch or Path(folder)
        wanted = [BY_NAME[name] for name in ([] if options.run is None else options.run or BY_NAME)]
        for row in runs(wanted, options.engine, scratch):
            print(f"{row.feature}: {row.failed or row.error or row.rooms}", flush=True)
            rows[row.place] = row
            ordered = [rows[place] for place in sorted(rows)]
            RESULTS.write_text(json.dumps([asdict(one) for one in ordered], indent=1) + "\n")
    PAGE.write_text(page([rows[place] for place in sorted(rows)]))
    return int(any(row.failed for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
