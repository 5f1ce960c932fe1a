# SPDX-License-Identifier: Apache-2.0
"""What is checked: families, rooms one by one and together, model runners; and what the states of an item mean."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_mmcache.lifecycle.tested_engines import ENGINE_ROOMS

FIRST_FAMILIES = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3.5", "gemma3")  # the zoo's, which need not be installed
# The families on which a room does something; together with the others it is on for every family.
WHERE: dict[str, tuple[str, ...]] = {
    "block_keys": FIRST_FAMILIES,
    "image_spans": ("gemma3",),
    "resumed_images": ("qwen3-vl", "gemma3"),
    "image_checkpoints": ("qwen3.5", "gemma3"),
    "metrics": ("qwen3-vl",),
    "features": FIRST_FAMILIES,
}
SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
WORKER = "vllm_mmcache.prove.worker"
UNTESTED = "MMCACHE_ALLOW_UNTESTED_VLLM"
MORE = ("place", "proven", "of_use", "answers", "image_tokens")  # what an item's process says for `mmcache prove`


@dataclass(frozen=True)
class How:
    """What the items of a run share."""

    precision: str | None = None
    short: bool = False
    log: Path | None = None
    """A file that gets what the items' processes say on stderr."""
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Further variables by model runner, for a platform that needs them."""
    arguments: tuple[str, ...] = ()
    """vLLM's, as on its command line."""
    own: str = ""
    """The user's own model, in place of the families' zoo models."""
    timeout_s: float = 900.0
    """An item that takes longer has failed."""


class OutOfTime(Exception):
    """The time that the command was given ended before an item did; nothing is known of it."""


RESULT = dict[str, Any]  # state, reason, checks: name -> {state, reason}, engine; and what else the process said


@dataclass(frozen=True)
class Item:
    """One engine: a family, the rooms that are on, the model runner, and whether it is compiled.

    Without a runner it is the one that vLLM takes by itself, in the user's environment.
    """

    family: str
    rooms: tuple[str, ...]
    runner: str | None
    compiled: bool = False
    together: bool = False
    """Whether these are all the rooms that will be on; such an item has no excuse."""

    @property
    def setting(self) -> tuple[str, str | None, bool]:
        """What it shares with the stock item that it is compared with."""
        return self.family, self.runner, self.compiled

    @property
    def what(self) -> str:
        """The rooms in words."""
        if not self.rooms:
            return "stock vLLM"
        return "all rooms" if set(self.rooms) == set(ENGINE_ROOMS) else " + ".join(self.rooms)

    @property
    def has_excuse(self) -> bool:
        """Whether it is not to blame for what stock gets wrong, too."""
        return bool(self.rooms) and not self.together and set(self.rooms) != set(ENGINE_ROOMS)

    @property
    def name(self) -> str:
        """The item on one line, as reports and logs name it: family, rooms, runner, eager or compiled."""
        engine = "compiled" if self.compiled else "eager" if self.runner else ""  # else it is as the arguments say
        return ", ".join(part for part in (self.family, self.what, self.runner, engine) if part)


def plan(families: Sequence[str], runners: Sequence[str], compiled: bool, short: bool) -> list[Item]:
    """The items in the order in which they are run: stock first, with which the others are compared; then all rooms."""
    items = []
    for runner in runners:
        if short:
            items += [Item(family, ENGINE_ROOMS, runner) for family in families]
            continue
        for rooms in ((), ENGINE_ROOMS):
            for is_compiled in (False, True) if compiled else (False,):
                items += [Item(family, rooms, runner, is_compiled) for family in families]
        items += [
            Item(family, (room,), runner) for room in ENGINE_ROOMS for family in families if family in WHERE[room]
        ]
    return items


def environment(item: Item, how: How) -> dict[str, str]:
    """The variables of an item's process: the rooms one by one, no other setting of the user's, one process.

    With a model runner, that one and no other plugin; without one what the user has, and the plugin where
    VLLM_PLUGINS leaves it out.
    """
    not_the_users = ("MMCACHE_", "BENCH_", "TEST_") if item.runner else ("MMCACHE_",)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(not_the_users) and k != "PYTHONOPTIMIZE"}
    if UNTESTED in os.environ:
        environ[UNTESTED] = os.environ[UNTESTED]
    if item.runner is not None:
        environ |= {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_PLUGINS": "mmcache"}
        environ[SWITCH] = "1" if item.runner == "V2" else "0"
        environ |= how.environments.get(item.runner, {})
    elif "mmcache" not in (plugins := environ.get("VLLM_PLUGINS", "mmcache").split(",")):
        environ["VLLM_PLUGINS"] = ",".join([*filter(None, plugins), "mmcache"])
    if not how.own:
        environ["HF_HUB_OFFLINE"] = "1"
    environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not item.rooms:
        return environ | {"MMCACHE_DISABLE": "1"}
    return environ | {f"MMCACHE_{room.upper()}": str(int(room in item.rooms)) for room in ENGINE_ROOMS}


def task_of(item: Item, how: How, stock: RESULT | None) -> dict[str, Any]:
    """What the item's process is to do; see checks.py and own_checks.py."""
    shared = {"rooms": item.rooms, "short": how.short, "arguments": how.arguments}
    if how.own:
        known = stock or {}
        seen = {"stock": known.get("answers"), "image_tokens": known.get("image_tokens")}
        return {"kind": "own", "model": how.own, **shared, **seen}
    zoo = {"family": item.family, "runner": item.runner, "precision": how.precision, "compiled": item.compiled}
    return {"kind": "check", **zoo, **shared}


def run(item: Item, how: How, stock: RESULT | None, left_s: float) -> RESULT:
    """Run an item in a process of its own; `stock` is what the same engine said without the plugin.

    Raises: OutOfTime, where it takes longer than `left_s` seconds; longer than the timeout is a failure.
    """
    if left_s <= 0:
        raise OutOfTime
    if stock is not None and "engine" not in stock:
        return unrunnable(stock)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", WORKER],
            input=json.dumps(task_of(item, how, stock)),
            env=environment(item, how),
            capture_output=True,
            text=True,
            check=False,
            timeout=min(left_s, how.timeout_s),
        )
    except subprocess.TimeoutExpired:
        if left_s < how.timeout_s:
            raise OutOfTime from None
        return {"state": "failed", "reason": f"took longer than {how.timeout_s:.0f} s"}
    if how.log is not None:
        with open(how.log, "a") as file:
            file.write(f"== {item.name}: exit code {done.returncode}\n{done.stderr[-20_000:]}\n")
    if done.returncode:
        # Without an engine there is nothing to hold against stock itself: the platform or this machine can't run it.
        return {"state": "failed" if item.rooms else "not checked", "reason": last_error(done.stderr, done.returncode)}
    said = json.loads(done.stdout.strip().splitlines()[-1])
    more = {name: said[name] for name in MORE if name in said}
    return {**judge(item, said, stock), **more}


def unrunnable(stock: RESULT) -> RESULT:
    """The result of an item whose engine does not start without the plugin either."""
    return {"state": "not checked", "reason": f"stock vLLM does not run this: {stock['reason']}"}


def last_error(stderr: str, returncode: int) -> str:
    """The last error that a process named on stderr, from its line on."""
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}; the kernel does that where memory runs out"
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
        if row["inexact"] and item.has_excuse:
            wrong = stock_is_wrong(row["check"], stock)
            if wrong:
                state, reason = "not checked", f"stock vLLM's own answers are wrong here: {wrong}"
        checks[row["check"]] = {"state": state} | ({"reason": reason} if reason else {})
    outcome = summed(checks)
    for name, check in checks.items():
        # A pass means that the rooms were in force, and that a wrong answer would have been seen.
        needed = name.startswith("control: ") or name.endswith(" is on")
        if outcome["state"] == "passed" and needed and check["state"] != "passed":
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
