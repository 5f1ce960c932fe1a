# SPDX-License-Identifier: Apache-2.0
"""The result of a machine: a file that later runs add to, what it proves, and the table of proven components."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mmcache_tools.prove_zoo.items import plan
from mmcache_tools.zoo import FIRST_FAMILIES, architecture_of

from scripts.gpu_check.found import REPO, Found
from vllm_mmcache.lifecycle import tested_engines
from vllm_mmcache.prove.items import Item

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


def components_proven(result: dict[str, Any], runner: str) -> dict[str, tuple[str, ...]]:
    """The components that this result proves for a model runner, "V1" or "V2", and for which of the zoo's families.

    Nothing that was run with the component failed. Every item of such a family with the component was run; one whose
    engine stock vLLM can't run either proves nothing and hinders nothing. The component alone, all components, and all
    components compiled must each have passed with one of the families. The other runner's items don't count.
    """
    whole = plan(tuple(FIRST_FAMILIES), [runner], result["platform"] != "cpu", short=False)
    return {
        component: families
        for component in tested_engines.ENGINE_COMPONENTS
        if (families := families_proven([item for item in whole if component in item.components], result["items"]))
    }


def families_proven(planned: Sequence[Item], ran: Mapping[str, Any]) -> tuple[str, ...]:
    """The families for which the planned items of a component prove it; none where one of the items failed."""
    outcomes = {item: ran.get(item.name, {"state": "not run"}) for item in planned}
    states = {
        item: outcome["state"]
        for item, outcome in outcomes.items()
        if outcome["state"] != "not checked" or "engine" in outcome
    }
    if not set(states.values()) <= {"passed", "not run"}:
        return ()
    missing = {item.subject for item, state in states.items() if state == "not run"}
    kinds = {(is_alone(item), item.compiled) for item in planned}
    seen = {(is_alone(item), item.compiled) for item in states if item.subject not in missing}
    return tuple(family for family in FIRST_FAMILIES if family not in missing) if kinds == seen else ()


def is_alone(item: Item) -> bool:
    """Whether its engine has one component on, with those that this one needs."""
    return len(item.components) < len(tested_engines.ENGINE_COMPONENTS)


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
        proven = components_proven(result, runner)
        if not proven:
            print(f"proven on {result['platform']}, model runner {runner}: nothing")
        for families in dict.fromkeys(proven.values()):
            components = tuple(name for name, its in proven.items() if its == families)
            is_whole = families == tuple(FIRST_FAMILIES)
            where = "" if is_whole else f", with {', '.join(families)}"
            print(f"proven on {result['platform']}, model runner {runner}{where}: {', '.join(components)}")
            architectures = () if is_whole else tuple(map(architecture_of, families))
            table.append(tested_engines.Row(engine_of(result, runner), components, evidence, architectures, 1))
    tested_engines.FILE.write_text(tested_engines.written(table))
