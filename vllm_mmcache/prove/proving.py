# SPDX-License-Identifier: Apache-2.0
"""What `mmcache prove` does for one model: stock, each component alone, all that passed together; what that proves.

A component is proven at a place if it passed alone, where it has a use for this model, and together with all others
that will be on there: those that passed, and those that are on without a proof of the user's. Everything else stays
off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_mmcache.lifecycle import user_proofs
from vllm_mmcache.lifecycle.registry import with_needed
from vllm_mmcache.lifecycle.tested_engines import ENGINE_COMPONENTS
from vllm_mmcache.lifecycle.user_proofs import ProofScope
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
    place: ProofScope | None = None
    components: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Component -> PROVEN, FAILED or NOT_CHECKED, and why."""
    by_default: tuple[str, ...] = ()
    """Components that are on at this place without a proof of the user's."""
    items: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What was run: name -> state, reason, checks, seconds."""

    def of(self, state: str) -> list[str]:
        """The components of a state."""
        return [component for component, (its, _) in self.components.items() if its == state]

    def as_json(self) -> dict[str, Any]:
        """For --json. `rooms` is `components` under its older name, which version 0.2 leaves out."""
        components = {component: {"state": state, "reason": why} for component, (state, why) in self.components.items()}
        place = None if self.place is None else vars(self.place)
        return {
            "subject": self.subject,
            "place": place,
            "components": components,
            "rooms": components,
            "items": self.items,
        }


def prove(
    runs: Runs, subject: str, how: str, components: Sequence[str], *, compiled: bool, tell: Tell | None = None
) -> Verdict:
    """Run a subject's items, one after the other, and keep what they prove. Raises: ProofsUnwritable.

    `compiled` is whether all components together run compiled, as on the user's server; each alone runs eagerly.
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
        verdict.components = dict.fromkeys(
            components, (NOT_CHECKED, f"stock vLLM does not run this: {stock['reason']}")
        )
        return verdict
    verdict.place, verdict.by_default = ProofScope(**stock["place"]), tuple(stock["proven"])
    # On the CPU images that attend both ways are right with this component alone, so the others are tried with it.
    base = ("image_spans",) if verdict.place.platform == "cpu" and "image_spans" in stock["of_use"] else ()
    useful = [
        component for component in (*base, *components) if component in stock["of_use"] and component in components
    ]
    useful = list(dict.fromkeys(useful))
    of = len(useful) + 2 + compiled
    alone: dict[str, RESULT] = {}
    for number, component in enumerate(useful, 2):
        alone[component] = run(f"{number}/{of}", Item(subject, ordered({*base, *with_needed(component)}), None))
        verdict.components[component] = state_of(alone[component])
    candidates = [
        component
        for component in components
        if component not in verdict.components or verdict.components[component][0] == PROVEN
    ]
    others = {
        component for component in verdict.by_default if verdict.components.get(component, (PROVEN, ""))[0] == PROVEN
    }
    if candidates:
        if compiled:
            run(f"{of - 1}/{of}", Item(subject, (), None, compiled=True))
        item = Item(subject, ordered(others.union(candidates)), None, compiled=compiled, together=True)
        outcome = run(f"{of}/{of}", item)
        for component in candidates:
            verdict.components[component] = together_of(component, outcome, alone.get(component), stock["place"])
    verdict.components = {component: verdict.components[component] for component in components}
    keep(runs, verdict)
    return verdict


def keep(runs: Runs, verdict: Verdict) -> None:
    """Write what is proven, and take back what failed."""
    passed, failed = verdict.of(PROVEN), verdict.of(FAILED)
    if verdict.place is not None and (passed or failed):
        user_proofs.add(verdict.place, passed, verdict.how, runs.how.arguments, failed)


def ordered(components: Iterable[str]) -> tuple[str, ...]:
    """The components in the order of ENGINE_COMPONENTS."""
    return tuple(component for component in ENGINE_COMPONENTS if component in set(components))


def state_of(outcome: RESULT) -> tuple[str, str]:
    """A component's state after its own item."""
    return {"passed": PROVEN, "failed": FAILED}.get(outcome["state"], NOT_CHECKED), outcome["reason"]


def together_of(component: str, outcome: RESULT, alone: RESULT | None, place: dict[str, Any]) -> tuple[str, str]:
    """A component's state after all components together, where it passed alone or has no use for this model.

    What it is for must really have happened in one of the two, and all items must have run at one place.
    """
    if outcome["state"] != "passed":
        state, why = state_of(outcome)
        return state, f"with the other components: {why}"
    if elsewhere := [one["place"] for one in (outcome, alone or outcome) if one["place"] != place]:
        return NOT_CHECKED, f"its engine was another than stock's: {ProofScope(**elsewhere[0]).words()}"
    if alone is None:
        return PROVEN, "together with the others; this model has no use for it"
    uses = [one["checks"].get(f"use of {component}", {}) for one in (alone, outcome)]
    if not any(use.get("state") == "passed" for use in uses):
        return NOT_CHECKED, f"it was not seen at work: {uses[0].get('reason', 'no check of its use')}"
    return PROVEN, "alone, and together with the others"


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """0 all that could be checked passed, 1 something failed, 2 nothing could be checked."""
    states = [state for verdict in verdicts for state, _ in verdict.components.values()]
    return 1 if FAILED in states else 0 if PROVEN in states else 2


def sentences(verdict: Verdict) -> list[str]:
    """What this means for the next start, a line each."""
    lines = []
    said = {component: why.rstrip(".") for component, (_, why) in verdict.components.items()}
    of = verdict.subject if verdict.place is None else f"{verdict.place.architecture} on {verdict.place.device}"
    if on := verdict.of(PROVEN):
        lines.append(f"On from the next start, for {of}: {', '.join(on)}.")
    for component in verdict.of(FAILED):
        line = f"{component} failed, and stays off for {of} unless you set it: {said[component]}."
        if component in verdict.by_default:
            line = (
                f"{component} failed, though this kind of engine has it on by default: {said[component]}. "
                f"MMCACHE_{component.upper()}=0 switches it off; please report it."
            )
        lines.append(line)
    by_reason: dict[str, list[str]] = {}
    for component in verdict.of(NOT_CHECKED):
        by_reason.setdefault(said[component], []).append(component)
    lines += [
        f"Could not be checked for {of}: {', '.join(components)}: {why}." for why, components in by_reason.items()
    ]
    return lines
