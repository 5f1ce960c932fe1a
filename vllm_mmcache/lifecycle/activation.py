# SPDX-License-Identifier: Apache-2.0
"""The one place that decides which rooms are on: when a process takes a role on, with the VllmConfig in its hands.

`plugin.register` installs nothing but the hooks that see the VllmConfig (hooks.py). Then, for each room with a part in
the role: is it wanted (settings), does it have something to do and can it be in this configuration (config_rules.py),
was it shown to be exact on this engine (tested_engines.py, user_proofs.py), does vLLM do it itself, does it fit
(hooking/hooks.py)? The answer is in rooms.py, where every wrapper asks for it; rank_sync.py and report.py tell others.
"""

import logging
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

from vllm_mmcache import __version__
from vllm_mmcache.base import settings, status
from vllm_mmcache.base.errors import HookError
from vllm_mmcache.base.settings_messages import EXPOSED_CURE, why_exposed
from vllm_mmcache.base.status import ON, ROLES, Role, State
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.hooking import hooks, subclasses
from vllm_mmcache.lifecycle import config_rules, user_proofs
from vllm_mmcache.lifecycle.extension_points import EXTENSION_POINTS
from vllm_mmcache.lifecycle.ledger import (
    ALWAYS,
    FIRST,
    NEEDS,
    OPT_IN,
    OVERTAKEN_BY,
    OVERTAKEN_WHERE,
    ROOMS,
    groups,
    parts,
)
from vllm_mmcache.lifecycle.tested_engines import ENGINE_ROOMS, Engine, minor_of, why_unproven

logger = logging.getLogger("vllm.mmcache")

WITHOUT_IDENTITY = "uuids of clients are trusted, and images are not apart by cache_salt"


def start() -> hooks.Outcome:
    """Install the hooks that see the VllmConfig; re-entrant.

    Where they don't fit this vLLM, nothing of mmcache can be on, and one line says why.
    Raises: SettingsError; HookError, where they don't fit and tenants must be kept apart.
    """
    version = vllm_version()
    outcome = _install(FIRST, groups()[FIRST], version)
    if outcome.state != "on":
        settings.warn_of_unknown_variables()
        refuse_if_required(f"nothing of mmcache is on: {outcome.reason}")
        logger.error("mmcache %s is off on vLLM %s: %s", __version__, version, outcome.reason)
    return outcome


def take_on(role: Role, vllm_config: Any) -> None:
    """Decide for each room with a part in a role that this process takes on, install what is on, and say so.

    Raises: HookError, where tenants must be kept apart and nothing would do it.
    """
    status.begin(role)
    if role == "api":  # one process says it, not each
        settings.warn_of_unknown_variables()
    version, engine = vllm_version(), engine_here(vllm_config)
    own, unusable = own_proofs(engine, vllm_config)
    absent = config_rules.why_absent(role, vllm_config)
    absent = absent or _install(f"{ALWAYS} ({role})", _telling(role), version).reason
    for room, members in parts(role).items():
        state = State("off", absent) if absent else decide(room, engine, vllm_config, own)
        if state == ON and (needed := NEEDS.get(room)) and status.of(role).get(needed, ON) != ON:
            state = State("off", f"needs {needed}, which is {status.of(role)[needed].state}")
        if state == ON:
            needed_here = [member for member in members if config_rules.has(vllm_config, member.only)]
            outcome = _install(f"{room} ({role})", needed_here, version)
            state = ON if outcome.state == "on" else State("off", outcome.reason)
        status.put(role, room, state)
    if role == "api" and status.of(role)["identity"].state == "off":
        reason = status.of(role)["identity"].reason
        refuse_if_required(f"identity is off ({reason}), so {WITHOUT_IDENTITY}")
        logger.error("mmcache: identity is off (%s): %s", reason, WITHOUT_IDENTITY)
    _say(role, version, engine)
    if role == "worker" and (wrong := config_rules.wrong_in_vllm(vllm_config)):
        logger.error("mmcache: vLLM itself answers wrongly here: %s. Way out: %s", wrong, config_rules.WAYS_OUT)
    if role == "api":
        for line in unusable:
            logger.warning("mmcache: %s", line)
        if exposed := why_exposed(settings.current()):
            logger.warning("mmcache: the store is open to others: %s. Way out: %s", exposed, EXPOSED_CURE)


def decide(room: str, engine: Engine, vllm_config: Any, own: Container[str] = ()) -> State:
    """What a room is to be on this engine, with this configuration; on, as far as is known without installing it.

    Without a configuration (None) what one would say is left out. own: the rooms of the user's own proofs.
    """
    chosen = settings.current()
    wanted = getattr(chosen, room)
    if wanted is False:
        asked = f"MMCACHE_{room.upper()}=1 switches it on" if room in OPT_IN else f"switched off by the setting {room}"
        return State("off", asked)
    if vllm_config is not None and (fixed := config_rules.state_in(room, vllm_config)):
        return fixed
    if room in OVERTAKEN_BY and all(hooks.is_there(symbol) for symbol in OVERTAKEN_BY[room]):
        return State("unneeded", f"vLLM has its own: {', '.join(OVERTAKEN_BY[room])}")
    if room in OVERTAKEN_WHERE and hooks.reads_name(*OVERTAKEN_WHERE[room]):
        return State("unneeded", f"vLLM has its own: {OVERTAKEN_WHERE[room][0]}")
    if wanted is None and not chosen.unproven and room not in own and (reason := why_unproven(room, engine)):
        return State("off", reason)
    return ON


def own_proofs(engine: Engine, vllm_config: Any) -> tuple[frozenset[str], list[str]]:
    """The rooms that the user has proven here, and lines about what of the proofs can't be used.

    Which ones hold here, or elsewhere alone, is looked at where a proof would help.
    """
    found, unusable = user_proofs.read()
    if vllm_config is None or not any(why_unproven(room, engine) for room in ENGINE_ROOMS):
        return frozenset(), unusable
    place = user_proofs.Place.of(vllm_config)
    return user_proofs.proven_rooms(place, found), unusable + user_proofs.why_passed_over(place, found)


def foresee(vllm_config: Any = None) -> dict[str, State]:
    """What each room will be over all processes, as far as is known before there is an engine. Installs nothing.

    Without a configuration: what it will be unless one says otherwise.
    """
    version, engine = vllm_version(), engine_here(vllm_config)
    own, _ = own_proofs(engine, vllm_config)
    nothing = misfit(groups()[FIRST], version)
    found: dict[str, State] = {}
    for role in ROLES:
        absent = nothing or misfit(_telling(role), version)
        for room, members in parts(role).items():
            state = found.get(room, ON)
            if state == ON:
                state = State("off", absent) if absent else decide(room, engine, vllm_config, own)
            if state == ON and (needed := NEEDS.get(room)) and found[needed] != ON:
                state = State("off", f"needs {needed}, which is {found[needed].state}")
            if state == ON and (reason := misfit(members, version)):
                state = State("off", reason)
            found[room] = state
    return {room: found[room] for room in ROOMS}


def misfit(members: Sequence[hooks.Hook], version: str) -> str:
    """Why these symbols can't all be replaced in this vLLM, with the settings in force; empty if they can."""
    return hooks.misfit(members, version, allow_untested=settings.current().allow_untested_vllm)


def refuse_if_required(reason: str) -> None:
    """Raises: HookError, with everything undone, where tenants must be kept apart and `reason` says why they can't."""
    if names := settings.current().promised_by:
        variables = ", ".join(f"MMCACHE_{name.upper()}" for name in names)
        stop()
        raise HookError(
            f"mmcache refuses to start: {' and '.join(names)} is set, but {reason}. Unset {variables} to run without."
        )


def engine_here(vllm_config: Any = None) -> Engine:
    """The engine of this process; without a VllmConfig its runner and scheduling are not known."""
    here = Engine(minor_of(vllm_version()), platform_name())
    if vllm_config is None:
        return here
    runner = 2 if vllm_config.use_v2_model_runner else 1
    return replace(here, runner=runner, scheduling="async" if vllm_config.scheduler_config.async_scheduling else "sync")


def platform_name() -> str:
    """The platform of this vLLM; its own device_type is "cuda" on an AMD GPU, too."""
    from vllm.platforms import current_platform

    return "rocm" if current_platform.is_rocm() else str(current_platform.device_type)


def stop() -> None:
    """Undo every extension point and every hook."""
    for point in reversed(EXTENSION_POINTS):
        point.undo()
    subclasses.undo()
    hooks.undo_all()


def words(states: Iterable[tuple[str, State]]) -> str:
    """Rooms and their states in one line: what is on, then the others with their reasons."""
    said = list(states)
    on = ", ".join(room for room, state in said if state.state == "on") or "nothing"
    others = "".join(
        f"; {kind}: " + ", ".join(f"{room} ({state.reason})" for room, state in said if state.state == kind)
        for kind in ("mixed", "off", "unneeded")
        if any(state.state == kind for _, state in said)
    )
    return on + others


def _telling(role: Role) -> list[hooks.Hook]:
    return [member for member in groups()[ALWAYS] if member.process == role]


def _install(group: str, members: list[hooks.Hook], version: str) -> hooks.Outcome:
    outcome = hooks.install(group, members, version, allow_untested=settings.current().allow_untested_vllm)
    if outcome.state != "on":
        return outcome
    try:
        for point in EXTENSION_POINTS:
            if group == f"{point.group} ({point.process})":
                point.install()
    except HookError as error:
        hooks.undo(group)
        return hooks.Outcome(group, "off", str(error))
    return outcome


def _say(role: Role, version: str, engine: Engine) -> None:
    """What is prepared in this process; what is in force is known when the model is loaded (report.py)."""
    where = f"[{role}] on {replace(engine, vllm=version)}"
    logger.info("mmcache %s %s: prepared: %s", __version__, where, words(status.of(role).items()))
    if settings.current().unproven:
        logger.warning("mmcache: MMCACHE_UNPROVEN is set: rooms are on that nobody has shown to be exact here")
