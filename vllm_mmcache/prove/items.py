# SPDX-License-Identifier: Apache-2.0
"""Items of `mmcache prove`: one engine each, with some components on, in a process of its own; what states mean."""

import json
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vllm_mmcache.lifecycle.tested_engines import ENGINE_COMPONENTS

UNTESTED = "MMCACHE_ALLOW_UNTESTED_VLLM"
MORE = ("place", "proven", "of_use", "answers", "image_tokens")  # what an item's process says for `mmcache prove`
RESULT = dict[str, Any]  # state, reason, checks: name -> {state, reason}, engine; and what else the process said


class OutOfTime(Exception):
    """The time that the command was given ended before an item did; nothing is known of it."""


@dataclass(frozen=True)
class Item:
    """One engine: what it is checked on, the components that are on, the model runner, and whether it is compiled.

    Without a runner it is the one that vLLM takes by itself, in the user's environment.
    """

    subject: str
    """The user's own model, or a family of the zoo."""
    components: tuple[str, ...]
    runner: str | None
    compiled: bool = False
    together: bool = False
    """Whether these are all the components that will be on; such an item has no excuse."""

    @property
    def setting(self) -> tuple[str, str | None, bool]:
        """What it shares with the stock item that it is compared with."""
        return self.subject, self.runner, self.compiled

    @property
    def what(self) -> str:
        """The components in words."""
        if not self.components:
            return "stock vLLM"
        return "all components" if set(self.components) == set(ENGINE_COMPONENTS) else " + ".join(self.components)

    @property
    def has_excuse(self) -> bool:
        """Whether it is not to blame for what stock gets wrong, too."""
        return bool(self.components) and not self.together and set(self.components) != set(ENGINE_COMPONENTS)

    @property
    def name(self) -> str:
        """The item on one line, as reports and logs name it: subject, components, runner, eager or compiled."""
        engine = "compiled" if self.compiled else "eager" if self.runner else ""  # else it is as the arguments say
        return ", ".join(part for part in (self.subject, self.what, self.runner, engine) if part)


@dataclass(frozen=True)
class RunOptions(ABC):
    """What the items of a run share, and what an item's process is given."""

    short: bool = False
    log: Path | None = None
    """A file that gets what the items' processes say on stderr."""
    arguments: tuple[str, ...] = ()
    """vLLM's, as on its command line."""
    timeout_s: float = 900.0
    """An item that takes longer has failed."""

    worker: ClassVar[str]
    """The module that an item's process runs."""
    fixed_arguments: ClassVar[tuple[str, ...]] = ()
    """Of vLLM's arguments those that the subject has its own of."""

    @abstractmethod
    def task(self, item: Item, stock: RESULT | None) -> dict[str, Any]:
        """What the item's process is to do; `stock` is what the same engine said without the plugin."""

    def environment(self, item: Item) -> dict[str, str]:
        """The variables of an item's process: those of the user, and the plugin where VLLM_PLUGINS leaves it out."""
        environ = users_environment("MMCACHE_")
        if "mmcache" not in (plugins := environ.get("VLLM_PLUGINS", "mmcache").split(",")):
            environ["VLLM_PLUGINS"] = ",".join([*filter(None, plugins), "mmcache"])
        return environ | switches(item)


@dataclass(frozen=True)
class OwnHow(RunOptions):
    """How items on the user's own model are run; large models load for minutes."""

    timeout_s: float = 3600.0
    model: str = ""

    worker: ClassVar[str] = "vllm_mmcache.prove.worker"

    def task(self, item: Item, stock: RESULT | None) -> dict[str, Any]:
        """The arguments of own_checks.check."""
        known = stock or {}
        shared = {"components": item.components, "short": self.short, "arguments": self.arguments}
        return {"model": self.model, **shared, "stock": known.get("answers"), "image_tokens": known.get("image_tokens")}


def users_environment(*without: str) -> dict[str, str]:
    """The user's variables but for those that begin so, and without assertions being off."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(without) and k != "PYTHONOPTIMIZE"}
    return environ | ({UNTESTED: os.environ[UNTESTED]} if UNTESTED in os.environ else {})


def switches(item: Item) -> dict[str, str]:
    """Variables for the item's components, one by one, and an engine in the item's own process."""
    one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if not item.components:
        return one_process | {"MMCACHE_DISABLE": "1"}
    return one_process | {
        f"MMCACHE_{component.upper()}": str(int(component in item.components)) for component in ENGINE_COMPONENTS
    }


def run(item: Item, how: RunOptions, stock: RESULT | None, left_s: float) -> RESULT:
    """Run an item in a process of its own; `stock` is what the same engine said without the plugin.

    Raises: OutOfTime, where it takes longer than `left_s` seconds; longer than the timeout is a failure.
    """
    if left_s <= 0:
        raise OutOfTime
    if stock is not None and "engine" not in stock:
        return unrunnable(stock)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", how.worker],
            input=json.dumps(how.task(item, stock)),
            env=how.environment(item),
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
        return {
            "state": "failed" if item.components else "not checked",
            "reason": last_error(done.stderr, done.returncode),
        }
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

    A component alone can't be blamed for an answer that stock gets wrong in the same check; all components together
    must be right all the same.
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
        # A pass means that the components were in force, and that a wrong answer would have been seen.
        needed = name.startswith("control: ") or name.endswith(" is on")
        if outcome["state"] == "passed" and needed and check["state"] != "passed":
            outcome = {"state": "not checked", "reason": f"{name}: {check['reason']}"}
    return {**outcome, "engine": said["engine"], "checks": checks}


def stock_is_wrong(check: str, stock: RESULT | None) -> str:
    """What stock got wrong in the same check; in any, for the use of a component, which stock does not have."""
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
