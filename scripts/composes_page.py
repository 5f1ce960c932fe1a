# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's features with the components and writes docs/composes.md from what came of it.

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
from tests.composes.features import BY_NAME, COMPONENT_NAMES, FEATURES, Feature
from tests.composes.running import judge, run

USUAL = ("properties", "system-out", "system-err")  # of a test that passed, in JUnit's format
RESULTS = REPO / "docs" / "composes.json"
PAGE = REPO / "docs" / "composes.md"
ENGINES = {"v1": "model runner V1", "v2": "model runner V2", "v2-async": "model runner V2, async scheduling"}

COLUMNS = {"v1": "V1", "v2": "V2", "v2-async": "V2 async"}

HEAD = """# What it composes with

<!-- written by scripts/composes_page.py from composes.json; don't edit -->

Beside which features of vLLM 0.32 the plugin stays exact, and what holds for [KV connectors](#kv-connectors). Tried on
the CPU with tiny models: Gemma 3 where no other is named. Numbers, dates and commits: `composes.json`.

- **exact**: every component with work on that model was on and reused what it could; answers had the tokens and
  log-probabilities (1e-3 in float32) of that engine's cold run, and another picture changed them.
- **component off**: exact without that component; the server says why at start.
- **fails**: vLLM itself ends so on the CPU. **-**: not run.

The last {deployed} rows are servers of Qwen3-VL, asked over HTTP; other questions go past `lazy_media`, `pixels` and
`identity`.

"""
NAMES = {"gemma3": "", "qwen3-vl": " (Qwen3-VL)", "qwen3.5": " (Qwen3.5)"}
KV_CONNECTORS = """## KV connectors

With `identity` on, a connector knows an image by its content within its tenant; on stock by its uuid, so another
picture under that gets a wrong answer. [Block keys](block_keys.md) under `sha256`, vLLM's default, outlive the process;
`xxhash` needs `PYTHONHASHSEED`.

Run on V1 with Qwen3-VL and Gemma 3, over restarts and with loads that fail: all answers were those of Transformers.

- ExampleConnector's files know no `cache_salt`: **a tenant's text is loaded for another**. It finds only whole prompts,
  computed in one step.
- Checkpoints are on for sliding windows on V1 with synchronous scheduling alone. On hybrids (Qwen3.5) loads within a
  step come after vLLM has copied the Mamba state: wrong answers, also without checkpoints.
- A failed load fails the request unless `kv_load_failure_policy` is `recompute`. Failed loads beside steps can hang the
  engine where blocks are few.
- Not LMCache in vLLM 0.32 (read, not run): `LMCacheMPConnector`, or `LMCacheConnectorV1` with `use_native`, can load
  another picture's KV.

KV that outlives a restart, on a GPU alone (read, not run):

    mmcache serve MODEL --prefix-caching-hash-algo sha256 --kv-transfer-config '{
      "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
        "secondary_tiers": [{"type": "fs", "root_dir": "/var/cache/vllm-kv"}]}}'

Servers on one directory need the same model, dtype, block size, key layout, and `identity`. Who writes there chooses
what the model reads. `mmcache doctor` checks connector, keys and identity.

On the CPU (`make bench-kv-restart`: 20 screenshots, 14,249 tokens) the first token after a restart took 6.5 s on stock,
0.69 s with ExampleConnector, 0.23 s with mmcache, too.
"""


@dataclass(frozen=True)
class Row:
    """One run of a feature."""

    feature: str
    engine: str
    components: dict[str, str] = field(default_factory=dict)
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
        components = {
            component: feature.expected(engine).get(component, "on")
            for component in COMPONENT_NAMES
            if component in feature.uses
        }
        why = "" if mine and not bad else f"pytest ended with {done.returncode}, of {len(mine)} tests: {bad}"
        yield Row(feature.name, engine, components=components, failed=why, **made())


def made() -> dict[str, Any]:
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
    return Row(
        **about, components={component: result["components"][component] for component in COMPONENT_NAMES}, **numbers
    )


def mark(feature: Feature, row: Row | None) -> str:
    """What came of a run."""
    if row is None:
        return "-"
    if row.failed:
        return one_line(f"**failed**: {row.failed}")
    if row.error:
        fails = feature.fails.get(row.engine)
        return f"fails: `{fails.words if fails and fails.words in row.error else short(row.error)}`"
    states = {component: state.partition(":")[0] for component, state in row.components.items()}
    off = [f"`{component}` {state}" for component, state in states.items() if state not in ("on", "unneeded")]
    return ", ".join(off) or "exact"


def about(feature: Feature, rows: Sequence[Row]) -> str:
    """The feature, its model where that is another than the head says, its note, and what alone was looked at."""
    model = "" if feature.uses == COMPONENT_NAMES else NAMES.get(feature.family, f" ({feature.family})")
    looked_at = [f"`{component}`" for component in COMPONENT_NAMES if any(component in row.components for row in rows)]
    only = f"only {', '.join(looked_at)}; " if 0 < len(looked_at) < len(COMPONENT_NAMES) else ""
    said = (only + feature.note).rstrip(".; ")
    return one_line(feature.title + model + (f"; {said}" if said else ""))


def page(rows: list[Row]) -> str:
    """The whole page: a row for each feature with a mark for each engine, then what is known of KV connectors."""
    engines = [engine for engine in ENGINES if any(row.engine == engine for row in rows)]
    lines = ["feature | " + " | ".join(COLUMNS[engine] for engine in engines), "---" + "|---" * len(engines)]
    for feature in FEATURES:
        mine = {row.engine: row for row in reversed(rows) if row.feature == feature.name}
        marks = [mark(feature, mine.get(engine)) for engine in engines]
        lines.append(" | ".join([about(feature, list(mine.values())), *marks]))
    deployed = sum(feature.uses == COMPONENT_NAMES for feature in FEATURES)
    return HEAD.format(deployed=deployed) + "\n".join(lines) + "\n\n" + KV_CONNECTORS


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
            print(f"{row.feature}: {row.failed or row.error or row.components}", flush=True)
            rows[row.place] = row
            ordered = [rows[place] for place in sorted(rows)]
            RESULTS.write_text(json.dumps([asdict(one) for one in ordered], indent=1) + "\n")
    PAGE.write_text(page([rows[place] for place in sorted(rows)]))
    return int(any(row.failed for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
