# SPDX-License-Identifier: Apache-2.0
"""The result of a machine: a file that later runs add to, what it proves, and the table of proven rooms."""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.found import REPO, Found
from benchmarks.gpu_check.items import plan
from vllm_mmcache.upstream import proven
from vllm_mmcache.zoo import FIRST_FAMILIES

FOLDER = Path(__file__).parent / "results"


def path_of(machine: str) -> Path:
    """The file of a machine."""
    return FOLDER / f"{re.sub('[^a-z0-9]+', '-', machine.lower()).strip('-')}.json"


def load(path: Path, found: Found) -> dict[str, Any]:
    """What earlier runs found on the same machine with the same vLLM; empty for another."""
    facts = asdict(found) | {"runners": list(found.runners)}
    if path.is_file():
        before: dict[str, Any] = json.loads(path.read_text())
        if all(before.get(name) == value for name, value in facts.items()):
            return before
    return {**facts, "items": {}, "benchmarks": {}, "not_checked": {}}


def save(path: Path, result: dict[str, Any]) -> None:
    """Write the file; items in the order of the plan."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def rooms_proven(result: dict[str, Any]) -> list[str]:
    """The rooms of which every item was run and none failed, and of which at least one item alone passed.

    An item of all rooms counts for each of them. What stock vLLM can't run itself proves nothing and hinders nothing.
    """
    compiled = result["platform"] != "cpu"
    items = plan(tuple(FIRST_FAMILIES), result["runners"], compiled, short=False)
    found = []
    for room in proven.ENGINE_ROOMS:
        states = {item: result["items"].get(item.name, {}).get("state") for item in items if room in item.rooms}
        alone = [state for item, state in states.items() if item.rooms == (room,)]
        together = [state for item, state in states.items() if item.rooms != (room,)]
        if set(states.values()) <= {"passed", "not checked"} and "passed" in alone and "passed" in together:
            found.append(room)
    return found


def record(result: dict[str, Any], path: Path) -> list[str]:
    """Put the rooms that are proven into the plugin's table, in place of what this file proved before."""
    evidence = str(path.relative_to(REPO))
    table = [row for row in proven.rows() if row["evidence"] != evidence]
    rooms = rooms_proven(result)
    if rooms:
        table.append(
            {"platform": result["platform"], "vllm": result["vllm"], "rooms": rooms, "evidence": evidence},
        )
    proven.FILE.write_text(written(table))
    return rooms


def written(table: Iterable[dict[str, Any]]) -> str:
    """The table of proven rooms as text: a value a line, lists in one."""
    rows = []
    for row in table:
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in row.items())
        rows.append(f"  {{\n{lines}\n  }}")
    return "[\n" + ",\n".join(rows) + "\n]\n"
