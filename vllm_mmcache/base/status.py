# SPDX-License-Identifier: Apache-2.0
"""Which components are on in this process, and why the others are not: the one answer, which every wrapper asks for.

A component (hooking/component.py) has a setting of its name. A process plays one role or several: it
makes the configuration and talks to clients (api, or the offline program), it schedules (engine), it runs the model
(worker). lifecycle/activation.py decides for a role when the process takes it on; what a component finds out later,
when the model is loaded, and what the ranks agree on, is put over that. Imports no vLLM.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from vllm_mmcache.base import settings
from vllm_mmcache.base.role import ROLES, Role


@dataclass(frozen=True)
class State:
    """on: in force. unneeded: nothing to do here, or vLLM does it itself. off: neither. mixed: not the same everywhere.

    `mixed` is said only of several processes together.
    """

    state: Literal["on", "off", "unneeded", "mixed"]
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else self.state


ON = State("on")

_states: dict[Role, dict[str, State]] = {}
_places: dict[str, dict[str, State]] = {}  # of the whole deployment, as `settle` was told
_order: tuple[str, ...] = ()
_everywhere: frozenset[str] = frozenset()  # components that are on in all of them
_is_on: dict[str, bool] = {}  # of _states, for the wrappers; replaced whole, since other threads read it meanwhile


def is_on(component: str) -> bool:
    """Whether a component is in force in all roles of this process; before a decision, whether it is wanted."""
    found = _is_on.get(component)
    if found is not None:
        return found
    wanted = getattr(settings.current(), component)
    return wanted is not False


def begin(role: Role) -> None:
    """The process takes a role on, perhaps anew, for another engine: what was said of it, and of those after, ends."""
    for ended in ROLES[ROLES.index(role) :]:
        _states.pop(ended, None)
    _states[role] = {}
    _refresh()


def put(role: Role, component: str, state: State) -> None:
    """Say what a component is in a role. Where the process does not have it, nobody asks."""
    if role in _states:
        _states[role][component] = state
        _refresh()


def of(role: Role) -> Mapping[str, State]:
    """What the components are that have a part in a role; empty where the process does not have it."""
    return _states.get(role, {})


def roles() -> tuple[Role, ...]:
    """The roles of this process."""
    return tuple(role for role in ROLES if role in _states)


def process_name() -> Role:
    """The first of this process's roles: what made it, not what it is called. api before it has any."""
    return next(iter(roles()), "api")


Places = Iterable[tuple[str, State]]
"""The name of a place, such as "worker 1 of engine 0", and what a component is there."""


def settle(places: Mapping[str, Mapping[str, State]], order: Iterable[str]) -> None:
    """Say what the components are in each process of the deployment, when all of them are there; {} where they are not.

    order: of the components, in what `in_force` returns.
    """
    global _places, _order, _everywhere
    _places = {place: dict(states) for place, states in places.items()}
    _order = tuple(order)
    _everywhere = frozenset(component for component, state in in_force().items() if state == ON)


def in_force() -> dict[str, State]:
    """What each component is over all processes; empty until the engines are ready. API server or offline program."""
    return {
        component: combine((place, states[component]) for place, states in _places.items() if component in states)
        for component in (_order if _places else ())
    }


def is_on_everywhere(component: str) -> bool:
    """Whether a component is on in all processes that have a part in it; not before the engines are ready."""
    return component in _everywhere


def places() -> dict[str, dict[str, State]]:
    """The same by process: "api", "engine 0", "worker 1 of engine 0"."""
    return {place: dict(states) for place, states in _places.items()}


def as_json() -> dict[str, Any]:
    """components: component -> state and reason, over all processes; places: the same for each process.

    `rooms` is `components` under its older name, which version 0.2 leaves out.
    """
    components = _plain(in_force())
    by_place = {place: _plain(states) for place, states in _places.items()}
    return {"components": components, "rooms": components, "places": by_place}


def why_off(found: Places) -> str:
    """The reasons of the processes where a component is off, with their names where others differ; empty if in none."""
    places = list(found)
    off = [(place, one.reason) for place, one in places if one.state == "off"]
    reasons = dict.fromkeys(reason for _, reason in off)
    if len(reasons) == 1 and len(off) == len(places):
        return next(iter(reasons))
    return "; ".join(f"{reason} ({', '.join(p for p, r in off if r == reason)})" for reason in reasons)


def combine(found: Places) -> State:
    """What a component is in several processes together: off or unneeded where on in none, mixed where off in some."""
    places = list(found)
    on = [place for place, one in places if one.state == "on"]
    if reason := why_off(places):
        return State("mixed", f"on in {', '.join(on)}; off: {reason}") if on else State("off", reason)
    if on:
        return ON
    if not places:
        return State("off", "no process has said what it is")
    return State("unneeded", "; ".join(dict.fromkeys(one.reason for _, one in places)))


def _plain(states: Mapping[str, State]) -> dict[str, dict[str, str]]:
    return {component: asdict(state) for component, state in states.items()}


def _refresh() -> None:
    global _is_on
    found: dict[str, bool] = {}
    for states in _states.values():
        for component, state in states.items():
            found[component] = found.get(component, True) and state.state == "on"
    _is_on = found


def _forget() -> None:
    _states.clear()
    _refresh()


os.register_at_fork(after_in_child=_forget)  # a forked engine is not the API server that it was
