# SPDX-License-Identifier: Apache-2.0
"""What is checked: families, rooms one by one and together, model runners; and what the states of an item mean."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_check.found import SWITCH
from vllm_mmcache.upstream.proven import ENGINE_ROOMS
from vllm_mmcache.zoo import FIRST_FAMILIES

# The families on which a room does something; together with the others it is on for every family.
WHERE: dict[str, tuple[str, ...]] = {
    "block_keys": tuple(FIRST_FAMILIES),
    "image_spans": ("gemma3",),
    "resumed_images": ("qwen3-vl", "gemma3"),
    "image_checkpoints": ("qwen3.5", "gemma3"),
    "metrics": ("qwen3-vl",),
    "features": tuple(FIRST_FAMILIES),
}
TIMEOUT_S = 900
RESULT = dict[str, Any]  # state, reason, checks: name -> {state, reason}, engine


@dataclass(frozen=True)
class Item:
    """One engine: a family, the rooms that are on, the model runner, and whether it is compiled."""

    family: str
    rooms: tuple[str, ...]
    runner: str
    compiled: bool = False

    @property
    def setting(self) -> tuple[str, str, bool]:
        """What it shares with the stock item that it is compared with."""
        return self.family, self.runner, self.compiled

    @property
    def what(self) -> str:
        """The rooms in words."""
        if not self.rooms:
            return "stock vLLM"
        return "all rooms" if set(self.rooms) == set(ENGINE_ROOMS) else " + ".join(self.rooms)

    @property
    def name(self) -> str:
        return f"{self.family}, {self.what}, {self.runner}, {'compiled' if self.compiled else 'eager'}"


def plan(families: Sequence[str], runners: Sequence[str], compiled: bool, short: bool) -> list[Item]:
    """The items in the order in which they are run: of each setting stock first, then each room, then all."""
    items = []
    for runner in runners:
        for family in families:
            rooms = [] if short else [(room,) for room in ENGINE_ROOMS if family in WHERE[room]]
            sets = [*([] if short else [()]), *rooms, ENGINE_ROOMS]
            items += [Item(family, one, runner) for one in sets]
            if compiled and not short:
                items += [Item(family, one, runner, compiled=True) for one in ((), ENGINE_ROOMS)]
    return items


def environment(item: Item) -> dict[str, str]:
    """The variables of an item's process: no setting of the user's, the rooms one by one, the model runner."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("MMCACHE_", "BENCH_"))}
    environ |= {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "mmcache"}
    environ[SWITCH] = "1" if item.runner == "V2" else "0"
    if not item.rooms:
        return environ | {"MMCACHE_DISABLE": "1"}
    return environ | {f"MMCACHE_{room.upper()}": str(int(room in item.rooms)) for room in ENGINE_ROOMS}


def run(item: Item, precision: str | None, short: bool, stock: RESULT | None) -> RESULT:
    """Run an item in a process of its own; `stock` is what the same engine said without the plugin."""
    if stock is not None and "engine" not in stock:
        return unrunnable(stock)
    task = {
        "kind": "check",
        "family": item.family,
        "rooms": item.rooms,
        "precision": precision,
        "compiled": item.compiled,
        "short": short,
    }
    command = [sys.executable, "-m", "benchmarks.gpu_check.worker"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(task),
            env=environment(item),
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return {"state": "failed", "reason": f"took longer than {TIMEOUT_S} s"}
    if done.returncode:
        # Without an engine there is nothing to hold against stock itself: the platform or this machine can't run it.
        return {"state": "failed" if item.rooms else "not checked", "reason": last_error(done.stderr, done.returncode)}
    said = json.loads(done.stdout.strip().splitlines()[-1])
    return judge(item, said, stock)


def unrunnable(stock: RESULT) -> RESULT:
    """The result of an item whose engine does not start without the plugin either."""
    return {"state": "not checked", "reason": f"stock vLLM does not run this: {stock['reason']}"}


def last_error(stderr: str, returncode: int) -> str:
    """The last error that a process named on stderr, from its line on."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if line.partition(":")[0].endswith(("Error", "Exception", "Interrupt"))]
    said = lines[starts[-1] :] if starts else lines[-1:]
    return " ".join(said).partition(" [type=")[0][:300] or f"exit code {returncode} without a word"


def judge(item: Item, said: Mapping[str, Any], stock: RESULT | None) -> RESULT:
    """An item's state out of its checks.

    A room alone can't be blamed for an answer that stock gets wrong in the same check; all rooms together must be
    right all the same.
    """
    checks: dict[str, dict[str, str]] = {}
    for row in said["rows"]:
        state, reason = row["state"], row["reason"]
        if row["inexact"] and item.rooms and item.what != "all rooms":
            wrong = stock_is_wrong(row["check"], stock)
            if wrong:
                state, reason = "not checked", f"stock vLLM's own answers are wrong here: {wrong}"
        checks[row["check"]] = {"state": state} | ({"reason": reason} if reason else {})
    outcome = summed(checks)
    for room in item.rooms if len(item.rooms) == 1 else ():
        force = checks.get(f"{room} is on", {})
        if outcome["state"] == "passed" and force.get("state") == "not checked":
            outcome = {"state": "not checked", "reason": f"{room} is not in force: {force['reason']}"}
    for name, check in checks.items():
        if outcome["state"] == "passed" and name.startswith("control: ") and check["state"] != "passed":
            # A pass means that a wrong answer would have been seen.
            outcome = {"state": "not checked", "reason": f"{name}: {check['reason']}"}
    return {**outcome, "engine": said["engine"], "checks": checks}


def stock_is_wrong(check: str, stock: RESULT | None) -> str:
    """What stock got wrong in the same check; in any, for the use of a room, which stock does not have."""
    failed = {name: one for name, one in (stock or {}).get("checks", {}).items() if one["state"] == "failed"}
    if check.startswith("use of "):
        return next((one["reason"] for one in failed.values()), "")
    return failed[check]["reason"] if check in failed else ""


def summed(checks: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """One state and one reason for several checks: the first failure, or else what was not checked."""
    for state in ("failed", "not checked"):
        found = [name for name, check in checks.items() if check["state"] == state]
        if found and (state == "failed" or len(found) == len(checks)):
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            return {"state": state, "reason": f"{found[0]}: {checks[found[0]]['reason']}{more}"}
    passed = sum(check["state"] == "passed" for check in checks.values())
    left: dict[str, list[str]] = {}
    for name, check in checks.items():
        if check["state"] == "not checked":
            left.setdefault(check["reason"].partition(": ")[0], []).append(name)
    reasons = "; ".join(f"{', '.join(names)} ({why})" for why, names in left.items())
    return {"state": "passed", "reason": f"{passed} checks" + (f"; not checked: {reasons}" if left else "")}
