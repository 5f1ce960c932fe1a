# SPDX-License-Identifier: Apache-2.0
"""The one place that decides which components are on: when a process takes a role on, with the VllmConfig in its hands.

`plugin.register` installs nothing but the hooks that see the VllmConfig (hooks.py). Then, for each component with a
part in the role: is it wanted (settings), does it have something to do and can it be in this configuration
(config_rules.py), was it shown to be exact on this engine (tested_engines.py, user_proofs.py), does vLLM do it itself,
does it fit (hooking/installer.py)? The answer is in base/status.py, where every wrapper asks for it; rank_sync.py and
report.py tell others.
"""

import contextlib
import logging
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from typing import Any

from vllm_mmcache import __version__
from vllm_mmcache.base import settings, status
from vllm_mmcache.base.errors import HookError, SymbolMissing
from vllm_mmcache.base.role import ROLES, Role
from vllm_mmcache.base.settings_messages import EXPOSED_CURE, why_exposed
from vllm_mmcache.base.status import ON, State
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.hooking import installer, subclasses
from vllm_mmcache.hooking.component import Component
from vllm_mmcache.hooking.hook import Hook
from vllm_mmcache.lifecycle import config_rules, user_proofs
from vllm_mmcache.lifecycle.registry import (
    AUDIT,
    COMPONENT_NAMES,
    COMPONENTS,
    FIRST,
    KV_EVENTS,
    REPORT,
    TRIAL,
    parts,
)
from vllm_mmcache.lifecycle.tested_engines import ENGINE_COMPONENTS, Served, engine_here, why_unproven
from vllm_mmcache.models import vllm_registry

logger = logging.getLogger("vllm.mmcache")

IF_TRIED = "if its trial passes while the engine starts"
WITHOUT_IDENTITY = "uuids of clients are trusted, and images are not apart by cache_salt"


def start() -> installer.Outcome:
    """Register the model classes, and install the hooks that see the VllmConfig; re-entrant.

    Where they don't fit this vLLM, nothing of mmcache can be on, and one line says why.
    Raises: SettingsError; HookError, where they don't fit and either tenants must be kept apart or attention=reference
    is set.
    """
    version = vllm_version()
    outcome = _install(FIRST.name, FIRST.all_hooks(), version)
    if outcome.state != "on":
        settings.warn_of_unknown_variables()
        refuse_if_required(f"nothing of mmcache is on: {outcome.reason}")
        refuse_reference(outcome.reason)
        logger.error("mmcache %s is off on vLLM %s: %s", __version__, version, outcome.reason)
    else:
        vllm_registry.register_classes()
    return outcome


def activate(role: Role, vllm_config: Any) -> None:
    """Decide for each component with a part in a role that this process takes on, install what is on, and say so.

    Raises: HookError, where tenants must be kept apart and nothing would do it, or attention=reference can't be had.
    """
    had_identity = status.of(role).get("identity") == ON
    status.begin(role)
    if role == "api":  # one process says it, not each
        settings.warn_of_unknown_variables()
    version, engine = vllm_version(), engine_here(vllm_config)
    own, unusable = own_proofs(engine, vllm_config)
    absent = config_rules.why_absent(role, vllm_config)
    absent = absent or _install(_group(REPORT.name, role), REPORT.hooks_in(role), version).reason
    if role == "engine":
        is_reference = settings.current().attention == "reference"
        without = absent
        if not absent and (is_reference or on_trial(vllm_config, own)):
            without = _install(_group(TRIAL.name, role), TRIAL.hooks_in(role), version).reason
        if without:
            refuse_reference(without)
    for component in parts(role).values():
        name = component.name
        state = State("off", absent) if absent else decide(name, engine, vllm_config, own)
        if state == ON and (needed := component.needs):
            other = status.of(role).get(needed) or decide(needed, engine, vllm_config, own)  # of another process
            state = state if other == ON else State("off", f"needs {needed}, which is {other.state}")
        if state == ON:
            state = _switch_on(component, role, vllm_config, version)
        if name == "identity" and had_identity and state.state == "unneeded":
            state = ON  # an engine that this process has made before takes images, and its tenants are still kept apart
        status.put(role, name, state)
    if role == "engine" and not absent:
        _install_what_is_asked_for(vllm_config, version)
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


def decide(name: str, engine: Served, vllm_config: Any, own: Container[str] = ()) -> State:
    """What a component is to be on this engine, with this configuration; on, as far as is known without installing it.

    Without a configuration (None) what one would say is left out. own: the components of the user's own proofs.
    """
    chosen, component = settings.current(), COMPONENTS[name]
    wanted = getattr(chosen, name)
    if wanted is False:
        variable = f"MMCACHE_{name.upper()}=1 switches it on"
        return State("off", variable if component.opt_in else f"switched off by the setting {name}")
    if vllm_config is not None and (fixed := config_rules.state_in(component, vllm_config)):
        return fixed
    if component.superseded_by and all(map(installer.is_there, component.superseded_by)):
        return State("unneeded", f"vLLM has its own: {', '.join(component.superseded_by)}")
    if component.superseded_if_reads and installer.reads_name(*component.superseded_if_reads):
        return State("unneeded", f"vLLM has its own: {component.superseded_if_reads[0]}")
    if wanted is None and not chosen.unproven and name not in own and (reason := why_unproven(name, engine)):
        if vllm_config is None or not chosen.trial_s:
            return State("off", reason)
        if no_trial := why_no_trial(vllm_config):
            return State("off", f"{reason} (this engine can't try it by itself: {no_trial})")
    return ON


def on_trial(vllm_config: Any, own: Container[str] | None = None) -> list[str]:
    """The components that an engine tries while it starts, as far as they turn out to be on.

    own: the components of the user's own proofs; None to read them.
    """
    chosen = settings.current()
    if why_no_trial(vllm_config):
        return []
    if chosen.trial_all:
        return list(ENGINE_COMPONENTS)
    if chosen.unproven:
        return []
    engine = engine_here(vllm_config)
    if own is None:
        own, _ = own_proofs(engine, vllm_config)
    return [
        name
        for name in ENGINE_COMPONENTS
        if getattr(chosen, name) is None and name not in own and why_unproven(name, engine)
    ]


def why_no_trial(vllm_config: Any) -> str:
    """Why an engine does not try its components; empty where it does. The same in all its processes."""
    if not settings.current().trial_s:
        return "the setting trial_s is 0"
    return config_rules.why_no_trial(vllm_config) or incompatibility(TRIAL.hooks_in("engine"), vllm_version())


def own_proofs(engine: Served, vllm_config: Any) -> tuple[frozenset[str], list[str]]:
    """The components that the user has proven here, and lines about what of the proofs can't be used.

    Which ones hold here, or elsewhere alone, is looked at where a proof would help.
    """
    found, unusable = user_proofs.read()
    if vllm_config is None or not any(why_unproven(component, engine) for component in ENGINE_COMPONENTS):
        return frozenset(), unusable
    scope = user_proofs.ProofScope.of(vllm_config)
    return user_proofs.proven_components(scope, found), unusable + user_proofs.why_passed_over(scope, found)


def predict(vllm_config: Any = None) -> dict[str, State]:
    """What each component will be over all processes, as far as is known before there is an engine. Installs nothing.

    The reason of one that is on says under which condition, where only a start can tell. Without a configuration: what
    it will be unless one says otherwise.
    """
    version, engine = vllm_version(), engine_here(vllm_config)
    own, _ = own_proofs(engine, vllm_config)
    nothing = incompatibility(FIRST.all_hooks(), version)
    found: dict[str, State] = {}
    for role in ROLES:
        absent = nothing or incompatibility(REPORT.hooks_in(role), version)
        for component in parts(role).values():
            name = component.name
            state = found.get(name, ON)
            if state == ON:
                state = State("off", absent) if absent else decide(name, engine, vllm_config, own)
            if state == ON and (needed := component.needs) and found[needed] != ON:
                state = State("off", f"needs {needed}, which is {found[needed].state}")
            if state == ON and (reason := incompatibility(_needed(component, role, vllm_config), version)):
                state = State("off", reason)
            found[name] = state
    if vllm_config is not None:
        tried = on_trial(vllm_config, own)
        for name in [name for name, state in found.items() if state == ON]:
            ifs = [COMPONENTS[name].on_if, IF_TRIED if name in tried else ""]
            found[name] = State("on", ", and ".join(filter(None, ifs)))
    return {name: found[name] for name in COMPONENT_NAMES}


def incompatibility(members: Iterable[Hook], version: str) -> str:
    """Why these symbols can't all be replaced in this vLLM, with the settings in force; empty if they can."""
    return installer.incompatibility(members, version, allow_untested=settings.current().allow_untested_vllm)


def refuse_if_required(reason: str) -> None:
    """Raises: HookError, with everything undone, where tenants must be kept apart and `reason` says why they can't."""
    if names := settings.current().promised_by:
        variables = ", ".join(f"MMCACHE_{name.upper()}" for name in names)
        stop()
        raise HookError(
            f"mmcache refuses to start: {' and '.join(names)} is set, but {reason}. Unset {variables} to run without."
        )


def refuse_reference(reason: str) -> None:
    """Raises: HookError, where the naive attention was asked for and `reason` says why it can't be had."""
    if settings.current().attention == "reference":
        raise HookError(f"attention=reference can't be had: {reason}. Unset MMCACHE_ATTENTION")


def stop() -> None:
    """Undo every extension point and every hook."""
    for component in reversed(COMPONENTS.values()):
        for role in component.on_install:
            with contextlib.suppress(SymbolMissing):  # what can't be imported is not installed
                component.extension_in(role).undo()
    subclasses.undo()
    vllm_registry.unregister_classes()
    installer.undo_all()


def step_aside(role: Role, name: str, reason: str) -> None:
    """A component has nothing to do in this process, as is known only now: its hooks are taken back."""
    status.put(role, name, State("unneeded", reason))
    try:
        installer.undo(_group(name, role))
    except HookError as error:  # another plugin's stand around them; ours do nothing any more
        logger.debug("mmcache: hooks of %s stay: %s", name, error)


def words(states: Iterable[tuple[str, State]]) -> str:
    """Components and their states in one line: what is on, then the others with their reasons."""
    said = list(states)
    on = ", ".join(component for component, state in said if state.state == "on") or "nothing"
    others = "".join(
        f"; {kind}: " + ", ".join(f"{component} ({state.reason})" for component, state in said if state.state == kind)
        for kind in ("mixed", "off", "unneeded")
        if any(state.state == kind for _, state in said)
    )
    return on + others


def _switch_on(component: Component, role: Role, vllm_config: Any, version: str) -> State:
    """Install what a component has in this role. Returns on, or off and why."""
    group = _group(component.name, role)
    outcome = _install(group, _needed(component, role, vllm_config), version)
    if outcome.state != "on":
        return State("off", outcome.reason)
    try:
        if (extension := component.extension_in(role)) is not None:
            extension.install()
    except HookError as error:
        installer.undo(group)
        return State("off", str(error))
    return ON


def _needed(component: Component, role: Role, vllm_config: Any) -> Iterator[Hook]:
    """The hooks that a component needs in this configuration; all of them where there is none. See `hooks_in`."""
    hooks = component.hooks_in(role)
    return (hook for hook in hooks if vllm_config is None or config_rules.needs_hook(vllm_config, hook.only))


def _install_what_is_asked_for(vllm_config: Any, version: str) -> None:
    """What is no component, and is in an engine only where a setting asks for it."""
    chosen = settings.current()
    events = vllm_config.kv_events_config
    if chosen.audit > 0:
        outcome = _install(_group(AUDIT.name, "engine"), AUDIT.hooks_in("engine"), version)
        if outcome.state != "on":
            logger.warning("mmcache: there is no audit of this engine: %s", outcome.reason)
    if (chosen.kv_event_ids, chosen.kv_event_salts) != ("vllm", True) and events and events.enable_kv_cache_events:
        outcome = _install(_group(KV_EVENTS.name, "engine"), KV_EVENTS.hooks_in("engine"), version)
        if outcome.state != "on":
            logger.warning("mmcache: KV events have vLLM's own form: %s", outcome.reason)


def _group(name: str, role: Role) -> str:
    return f"{name} ({role})"


def _install(group: str, hooks: Iterable[Hook], version: str) -> installer.Outcome:
    return installer.install(group, hooks, version, allow_untested=settings.current().allow_untested_vllm)


def _say(role: Role, version: str, engine: Served) -> None:
    """What is prepared in this process; what is in force is known when the model is loaded (report.py)."""
    where = f"[{role}] on {replace(engine, vllm=version)}"
    logger.info("mmcache %s %s: prepared: %s", __version__, where, words(status.of(role).items()))
    if settings.current().unproven:
        logger.warning("mmcache: MMCACHE_UNPROVEN is set: components are on that nobody has shown to be exact here")
