# SPDX-License-Identifier: Apache-2.0
"""The result of a machine: a file that later runs add to, what it proves, and the table of proven components."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mmcache_tools.prove_zoo.items import plan
from mmcache_tools.zoo import FIRST_FAMILIES

from scripts.gpu_check.found import REPO, Found
from vllm_mmcache.lifecycle import tested_engines

FOLDER = Path(__file__).parent / "results"


def path_of(machine: str) -> Path:
    """The file of a machine."""
    return FOLDER / f"{re.sub('[^a-z0-9]+', '-', machine.lower()).strip('-')}.json"


def load(path: Path, found: Found) -> dict[str, Any]:
    """What earlier runs found on the same machine with the same vLLM; empty for another."""
    facts = asdict(found) | {"runners": list(found.runners)}
    before: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return before if facts.items() <= before.items() else {**facts, "items": {}, "not_checked": {}}


def save(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def components_proven(result: dict[str, Any], runner: str) -> list[str]:
    """The components that this result proves for a model runner, "V1" or "V2"; the other runner's items don't count.

    Every item with the component was run and has passed. One whose engine stock vLLM can't run either proves nothing
    and hinders nothing; but the component alone, all components, and all components compiled must each have passed
    somewhere.
    """
    items = plan(tuple(FIRST_FAMILIES), [runner], result["platform"] != "cpu", short=False)
    states: dict[tuple[str, bool, bool], set[str]] = {}
    for item in items:
        outcome = result["items"].get(item.name, {"state": "not run"})
        is_unrunnable = outcome["state"] == "not checked" and "engine" not in outcome
        for component in item.components:
            kind = states.setdefault((component, len(item.components) == 1, item.compiled), set())
            kind |= set() if is_unrunnable else {outcome["state"]}
    return [component for component in tested_engines.ENGINE_COMPONENTS
            if all(found == {"passed"} for kind, found in states.items() if kind[0] == component)]  # fmt: skip


def engine_of(result: dict[str, Any], runner: str) -> tested_engines.Engine:
    """The kind of engine that a runner's items ran on. Raises: ValueError, if they were of two kinds."""
    ran = [one["engine"] for name, one in result["items"].items() if f", {runner}, " in name and one.get("engine")]
    scheduling = {"async" if engine["async_scheduling"] else "sync" for engine in ran}
    if len(scheduling) != 1:
        raise ValueError(f"{runner} has items with {' and '.join(sorted(scheduling)) or 'no known'} scheduling")
    number = int(runner.removeprefix("V"))
    return tested_engines.Engine(tested_engines.minor_of(result["vllm"]), result["platform"], number, scheduling.pop())  # type: ignore[arg-type]


def record(result: dict[str, Any], path: Path) -> None:
    """Put what is proven into the plugin's table, in place of what this file proved before, and say it."""
    evidence = str(path.relative_to(REPO))
    table = [row for row in tested_engines.rows() if row.evidence != evidence]
    for runner in result["runners"]:
        components = components_proven(result, runner)
        print(f"proven on {result['platform']}, model runner {runner}: {', '.join(components) or 'nothing'}")
        if components:
            table.append(tested_engines.Row(engine_of(result, runner), tuple(components), evidence))
    tested_engines.FILE.write_text(tested_engines.written(table))
