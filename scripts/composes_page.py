# SPDX-License-Identifier: Apache-2.0
"""Runs features of vLLM with the plugin's components, and writes docs/composes.md from the results.

    python -m scripts.composes_page [--run FEATURE ... | --run] [--engine v1]

`--run` runs the named features, or all of them if it names none, and records the results in docs/composes.json. Without
`--run`, nothing is run and the page is written from the committed results. tests/engine/composes/features.py lists the
features.
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
from tests.engine.composes.features import BY_NAME, COMPONENT_NAMES, FEATURES, Feature
from tests.engine.composes.running import judge, run

USUAL = ("properties", "system-out", "system-err")  # of a test that passed, in JUnit's format
RESULTS = REPO / "docs" / "composes.json"
PAGE = REPO / "docs" / "composes.md"
ENGINES = {"v1": "model runner V1", "v2": "model runner V2", "v2-async": "model runner V2, async scheduling"}

COLUMNS = {
    "v1": "model runner V1, synchronous",
    "v2": "model runner V2, synchronous",
    "v2-async": "model runner V2, async scheduling",
}

HEAD = """# Which features of vLLM the plugin works beside

<!-- written by scripts/composes_page.py from composes.json; don't edit -->

For operators who use other features of vLLM and want to know whether answers stay exact with the plugin. The first part
is a table of features of vLLM 0.32. The second part is about [KV connectors](#kv-connectors), which move KV blocks out
of the engine, and has a configuration whose KV outlives a restart.

## Features of vLLM

Each feature was tried on the CPU with a tiny model, which is Gemma 3 where a row names no other. `docs/composes.json`
has the numbers, dates and commits of these runs. A cell has one of these results:

- **exact**: every component that was looked at and has work to do on that model was on, and reused what it could. The
  answers had the tokens and the log-probabilities of the same engine's answers when nothing was cached.
  Log-probabilities may differ by 1e-3 in float32, and by 0.5 where the model or its KV cache has a smaller type.
  Another picture changed the answer.
- **exact, with a component off**: the same without that component. The server says at start why it is off.
- **vLLM fails**: vLLM ends with this error on the CPU, also without the plugin.
- **not run**: nobody has tried it.

The component `inner_checkpoints` was not looked at in these runs. It is off beside speculative decoding and beside KV
connectors ([what that costs](checkpoints.md#cost)).

The last {deployed} rows are servers of Qwen3-VL that were asked over HTTP. In the other rows an engine was asked
directly, so `lazy_media`, `lazy_processing` and `identity`, which work in the API server, had no part in them.

"""
NAMES = {"gemma3": "", "qwen3-vl": " (Qwen3-VL)", "qwen3.5": " (Qwen3.5)"}
KV_CONNECTORS = """## KV connectors

A KV connector is vLLM's way to load KV blocks from outside the engine and to save them there.

### What the plugin changes

With `identity` on, a connector knows an image by its content within its tenant. On stock vLLM it knows an image by the
client's uuid, so a request that sends another picture under the same uuid gets a wrong answer.

A connector that finds KV by [block keys](block_keys.md) needs keys that outlive the process. Under `sha256`, vLLM's
default, they do. Under `xxhash` they do only where `PYTHONHASHSEED` is set.

### Keep KV across restarts, on a GPU

This configuration keeps KV in a directory. It was checked by reading vLLM's code and has not been run. vLLM runs
`OffloadingConnector` on GPUs alone.

```bash
mmcache serve MODEL --prefix-caching-hash-algo sha256 --kv-transfer-config '{
  "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
  "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
    "secondary_tiers": [{"type": "fs", "root_dir": "/var/cache/vllm-kv"}]}}'
```

Servers that share one directory need the same model, dtype, block size, layout of block keys, and setting of
`identity`. Whoever can write to the directory decides what the model reads. `mmcache doctor` checks the connector, the
keys and `identity` of a configuration.

### What was run

vLLM's ExampleConnector and a connector of the project's tests were run on model runner V1 with Qwen3-VL and Gemma 3,
over restarts and with loads that fail. All answers were those of Transformers. So were those of Gemma 3 on model runner
V2 with async scheduling, with loads in a step and beside the steps.

A conversation about 20 screenshots, with a prompt of 14,249 tokens, was continued after a restart on the CPU
(`make bench-kv-restart`). The first token came after 8.4 s on stock vLLM without a connector, after 0.97 s on stock
vLLM with ExampleConnector, and after 0.27 s with ExampleConnector and the plugin.

### Limits

- The files of ExampleConnector have no `cache_salt` in their names, so **the KV of one tenant's text is loaded for
  another tenant**. Use this connector for one tenant. It finds only whole prompts that were computed in one step.
- `image_checkpoints` is on beside a connector only for models with sliding windows, and on model runner V1 only with
  synchronous scheduling. On hybrid models (Qwen3.5), what a connector loads in a step comes after vLLM has copied the
  Mamba state, on V1 and V2. Their answers are wrong then, also without checkpoints. Answers after a load that runs
  beside the steps are right.
- A load that fails makes its request fail, unless `kv_load_failure_policy` is `recompute`. If loads fail while steps
  run and few KV blocks are free, the engine can hang.
- Don't use LMCache with images in vLLM 0.32: `LMCacheMPConnector`, and `LMCacheConnectorV1` with `use_native`, can load
  the KV of another picture. This was found by reading their code, and was not run.
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
        return "not run"
    if row.failed:
        return one_line(f"**failed**: {row.failed}")
    if row.error:
        fails = feature.fails.get(row.engine)
        return f"vLLM fails: `{fails.words if fails and fails.words in row.error else short(row.error)}`"
    states = {component: state.partition(":")[0] for component, state in row.components.items()}
    off = [f"`{component}` {state}" for component, state in states.items() if state not in ("on", "unneeded")]
    return f"exact, with {', '.join(off)}" if off else "exact"


def about(feature: Feature, rows: Sequence[Row]) -> str:
    """The feature, its model where that is another than the head says, what alone was looked at, and its note."""
    model = "" if feature.uses == COMPONENT_NAMES else NAMES.get(feature.family, f" ({feature.family})")
    looked_at = [f"`{component}`" for component in COMPONENT_NAMES if any(component in row.components for row in rows)]
    some = 0 < len(looked_at) < len(COMPONENT_NAMES)
    only = f"The tests look at {', '.join(looked_at[:-1])} and {looked_at[-1]} alone." if some else ""
    said = " ".join(filter(None, (only, feature.note)))
    return one_line(feature.title + model + (f". {said}" if said else ""))


def page(rows: list[Row]) -> str:
    """The whole page: a row for each feature with a mark for each engine, then what is known of KV connectors."""
    engines = [engine for engine in ENGINES if any(row.engine == engine for row in rows)]
    lines = ["feature of vLLM | " + " | ".join(COLUMNS[engine] for engine in engines), "---" + "|---" * len(engines)]
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
