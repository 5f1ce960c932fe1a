# SPDX-License-Identifier: Apache-2.0
"""What `mmcache prove` does for one model: stock, each room alone, all that passed together; then what that proves.

A room is proven at a place if it passed alone, where it has a use for this model, and together with all others that
will be on there: those that passed, and those that are on without a proof of the user's. Everything else stays off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_mmcache.lifecycle import user_proofs
from vllm_mmcache.lifecycle.tested_engines import ENGINE_ROOMS
from vllm_mmcache.lifecycle.user_proofs import Place
from vllm_mmcache.prove.items import RESULT, Item
from vllm_mmcache.prove.runs import Runs

PROVEN, FAILED, NOT_CHECKED = "proven", "failed", "not checked"

Tell = Callable[[str, Item, RESULT | None, float], None]
"""Called before an item with None, and after it with its result and the seconds that it took."""


@dataclass
class Verdict:
    """What was found for one subject: a zoo family, or the user's own model."""

    subject: str
    how: str
    """In words, for the proof: "zoo family gemma3"."""
    place: Place | None = None
    rooms: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Room -> PROVEN, FAILED or NOT_CHECKED, and why."""
    by_default: tuple[str, ...] = ()
    """Rooms that are on at this place without a proof of the user's."""
    items: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What was run: name -> state, reason, checks, seconds."""

    def of(self, state: str) -> list[str]:
        """The rooms of a state."""
        return [room for room, (its, _) in self.rooms.items() if its == state]

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        rooms = {room: {"state": state, "reason": why} for room, (state, why) in self.rooms.items()}
        place = None if self.place is None else vars(self.place)
        return {"subject": self.subject, "place": place, "rooms": rooms, "items": self.items}


def prove(
    runs: Runs, subject: str, how: str, rooms: Sequence[str], *, compiled: bool, tell: Tell | None = None
) -> Verdict:
    """Run a subject's items, one after the other, and keep what they prove. Raises: ProofsUnwritable.

    `compiled` is whether all rooms together run compiled, as on the user's server; each alone runs eagerly.
    """
    verdict = Verdict(subject, how)

    def run(number: str, item: Item) -> RESULT:
        if tell is not None:
            tell(number, item, None, 0.0)
        start = time.monotonic()
        outcome = runs.run(item)
        seconds = time.monotonic() - start
        kept = {name: outcome[name] for name in ("state", "reason", "engine", "checks") if name in outcome}
        verdict.items[item.name] = kept | {"seconds": round(seconds, 1)}
        if tell is not None:
            tell(number, item, outcome, seconds)
        return outcome

    stock = run("1", Item(subject, (), None))
    if "engine" not in stock:
        verdict.rooms = dict.fromkeys(rooms, (NOT_CHECKED, f"stock vLLM does not run this: {stock['reason']}"))
        return verdict
    verdict.place, verdict.by_default = Place(**stock["place"]), tuple(stock["proven"])
    # On the CPU images that attend both ways are right with this room alone, so the others are tried with it.
    base = ("image_spans",) if verdict.place.platform == "cpu" and "image_spans" in stock["of_use"] else ()
    useful = [room for room in (*base, *rooms) if room in stock["of_use"] and room in rooms]
    useful = list(dict.fromkeys(useful))
    of = len(useful) + 2 + compiled
    alone: dict[str, RESULT] = {}
    for number, room in enumerate(useful, 2):
        alone[room] = run(f"{number}/{of}", Item(subject, ordered({*base, room}), None))
        verdict.rooms[room] = state_of(alone[room])
    candidates = [room for room in rooms if room not in verdict.rooms or verdict.rooms[room][0] == PROVEN]
    others = {room for room in verdict.by_default if verdict.rooms.get(room, (PROVEN, ""))[0] == PROVEN}
    if candidates:
        if compiled:
            run(f"{of - 1}/{of}", Item(subject, (), None, compiled=True))
        item = Item(subject, ordered(others.union(candidates)), None, compiled=compiled, together=True)
        outcome = run(f"{of}/{of}", item)
        for room in candidates:
            verdict.rooms[room] = together_of(room, outcome, alone.get(room), stock["place"])
    verdict.rooms = {room: verdict.rooms[room] for room in rooms}
    keep(runs, verdict)
    return verdict


def keep(runs: Runs, verdict: Verdict) -> None:
    """Write what is proven, and take back what failed."""
    passed, failed = verdict.of(PROVEN), verdict.of(FAILED)
    if verdict.place is not None and (passed or failed):
        user_proofs.add(verdict.place, passed, verdict.how, runs.how.arguments, failed)


def ordered(rooms: Iterable[str]) -> tuple[str, ...]:
    """The rooms in the order of ENGINE_ROOMS."""
    return tuple(room for room in ENGINE_ROOMS if room in set(rooms))


def state_of(outcome: RESULT) -> tuple[str, str]:
    """A room's state after its own item."""
    return {"passed": PROVEN, "failed": FAILED}.get(outcome["state"], NOT_CHECKED), outcome["reason"]


def together_of(room: str, outcome: RESULT, alone: RESULT | None, place: dict[str, Any]) -> tuple[str, str]:
    """A room's state after all rooms together, where it passed alone or has no use for this model.

    What it is for must really have happened in one of the two, and all items must have run at one place.
    """
    if outcome["state"] != "passed":
        state, why = state_of(outcome)
        return state, f"with the other rooms: {why}"
    if elsewhere := [one["place"] for one in (outcome, alone or outcome) if one["place"] != place]:
        return NOT_CHECKED, f"its engine was another than stock's: {Place(**elsewhere[0]).words()}"
    if alone is None:
        return PROVEN, "together with the others; this model has no use for it"
    uses = [one["checks"].get(f"use of {room}", {}) for one in (alone, outcome)]
    if not any(use.get("state") == "passed" for use in uses):
        return NOT_CHECKED, f"it was not seen at work: {uses[0].get('reason', 'no check of its use')}"
    return PROVEN, "alone, and together with the others"


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """0 all that could be checked passed, 1 something failed, 2 nothing could be checked."""
    states = [state for verdict in verdicts for state, _ in verdict.rooms.values()]
    return 1 if FAILED in states else 0 if PROVEN in states else 2


def sentences(verdict: Verdict) -> list[str]:
    """What this means for the next start, a line each."""
    lines = []
    said = {room: why.rstrip(".") for room, (_, why) in verdict.rooms.items()}
    of = verdict.subject if verdict.place is None else f"{verdict.place.architecture} on {verdict.place.device}"
    if on := verdict.of(PROVEN):
        lines.append(f"On from the next start, for {of}: {', '.join(on)}.")
    for room in verdict.of(FAILED):
        line = f"{room} failed, and stays off for {of} unless you set it: {said[room]}."
        if room in verdict.by_default:
            line = (
                f"{room} failed, though this kind of engine has it on by default: {said[room]}. "
                f"MMCACHE_{room.upper()}=0 switches it off; please report it."
            )
        lines.append(line)
    by_reason: dict[str, list[str]] = {}
    for room in verdict.of(NOT_CHECKED):
        by_reason.setdefault(said[room], []).append(room)
    lines += [f"Could not be checked for {of}: {', '.join(rooms)}: {why}." for why, rooms in by_reason.items()]
    return lines
