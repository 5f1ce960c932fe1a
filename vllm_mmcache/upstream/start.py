# SPDX-License-Identifier: Apache-2.0
"""What `plugin.register` does: settings, then each group of the ledger, then one line about it per process."""

import logging
import multiprocessing
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from vllm_mmcache import __version__, settings
from vllm_mmcache.errors import SwapError
from vllm_mmcache.upstream import swap, vllm_version
from vllm_mmcache.upstream.ledger import NEEDS, OPT_IN, OVERTAKEN_BY, OVERTAKEN_WHERE, groups
from vllm_mmcache.upstream.proven import ENGINE_ROOMS, Engine, minor_of, why_unproven
from vllm_mmcache.upstream.seams import SEAMS

logger = logging.getLogger("vllm.mmcache")

LOUD = {"identity": "uuids of clients are trusted, and images are not apart by cache_salt"}  # what it means to be off

_off: dict[str, str] = {}  # group -> why it is not on in this process
_line = ""  # what this process has said, or is about to
_pending = ""


def start() -> list[swap.Outcome]:
    """Install every group that is switched on and fits. Returns the outcomes; re-entrant.

    Raises: SettingsError; SwapError where a group must not be missing.
    """
    version = vllm_version()
    outcomes: list[swap.Outcome] = []
    for group, members in groups().items():
        if process_name() != "api" and all(member.process == "api" for member in members):
            continue  # would import the server into a process that has none
        if group in OPT_IN and not getattr(settings.current(), group):
            continue
        reason = why_off(group) or why_alone(group, {outcome.group for outcome in outcomes if outcome.state == "on"})
        if reason:
            outcomes.append(swap.Outcome(group, "off", reason))
        else:
            outcomes.append(_install(group, members, version))
    for outcome in outcomes:
        if outcome.state == "refused":
            stop()
            raise SwapError(
                f"mmcache refuses to start, since answers could be wrong without {outcome.group}: "
                f"{outcome.reason}. MMCACHE_DISABLE=1 runs vLLM as it is."
            )
    _off.clear()
    _off.update({outcome.group: outcome.reason for outcome in outcomes if outcome.state == "off"})
    refuse_without_identity()
    _say(version, outcomes)
    return outcomes


def refuse_without_identity() -> None:
    """Raises: SwapError, with everything undone, where salts are required but nothing would keep tenants apart."""
    wanted = settings.current()
    reason = _off.get("identity", "") or ("" if wanted.identity else "switched off by the setting identity")
    if wanted.require_salt and reason:
        stop()
        raise SwapError(
            f"mmcache refuses to start: require_salt is set, but identity is off ({reason}), so "
            f"{LOUD['identity']}. Unset MMCACHE_REQUIRE_SALT to run without."
        )


def settle(vllm_config: Any) -> dict[str, str]:
    """Switch off the rooms that were not exercised on this engine, now that its runner and scheduling are known.

    Room -> why. A room that its setting switches on stays on.
    """
    wanted, engine = settings.current(), engine_here(vllm_config)
    rooms = [room for room in ENGINE_ROOMS if getattr(wanted, room) is None]
    off = {room: reason for room in rooms if (reason := why_unproven(room, engine))}
    settings.use(wanted.model_copy(update=dict.fromkeys(off, False)))
    if unsaid := [f"{room}: {reason}" for room, reason in off.items() if room not in _off]:
        logger.warning("mmcache [%s]: off for this engine: %s", process_name(), "; ".join(unsaid))
    _off.update(off)
    return off


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
    """Undo every seam and every swap."""
    for seam in reversed(SEAMS):
        seam.undo()
    swap.undo_all()


def why_off(group: str) -> str:
    """Why a group is not wanted here; empty if it is."""
    if settings.current().disable:
        return "MMCACHE_DISABLE is set"
    wanted = getattr(settings.current(), group, True)
    if wanted is False:
        return f"switched off by the setting {group}"
    if wanted is None and (reason := why_unproven(group, engine_here())):
        return reason
    if group in OVERTAKEN_BY and all(swap.is_there(symbol) for symbol in OVERTAKEN_BY[group]):
        return f"vLLM has its own: {', '.join(OVERTAKEN_BY[group])}"
    if group in OVERTAKEN_WHERE and swap.reads_name(*OVERTAKEN_WHERE[group]):
        return f"vLLM has its own: {OVERTAKEN_WHERE[group][0]}"
    return ""


def why_alone(group: str, groups_on: Collection[str]) -> str:
    """Why a group can't do without another that is not on; empty if it can, or need not."""
    needed = NEEDS.get(group)
    return "" if needed is None or needed in groups_on else f"needs {needed}, which is off"


def _install(group: str, members: list[swap.Swap], version: str) -> swap.Outcome:
    outcome = swap.install(group, members, version, allow_untested=settings.current().allow_untested_vllm)
    if outcome.state != "on":
        return outcome
    try:
        for seam in SEAMS:
            if seam.group == group:
                seam.install()
    except SwapError as error:
        swap.undo(group)
        return swap.Outcome(group, "off", str(error))
    return outcome


def process_name() -> str:
    """api (or the offline program), engine or worker, by the name that vLLM gives its processes."""
    name = multiprocessing.current_process().name.lower()
    if "enginecore" in name or "engine_core" in name:
        return "engine"
    if "worker" in name:
        return "worker"
    return "api"


def say_pending() -> None:
    """Log this process's line once vLLM has set logging up; offline, that is after plugins are loaded."""
    global _pending
    if _pending and logging.getLogger("vllm").hasHandlers():
        logger.info(_pending)
        _pending = ""
        for group in LOUD.keys() & _off.keys():
            logger.error("mmcache: %s is off (%s): %s", group, _off[group], LOUD[group])


def _say(version: str, outcomes: list[swap.Outcome]) -> None:
    global _line, _pending
    on = [outcome.group for outcome in outcomes if outcome.state == "on"]
    off = [f"{outcome.group}: {outcome.reason}" for outcome in outcomes if outcome.state != "on"]
    line = f"mmcache {__version__} on vLLM {version} [{process_name()}]: {len(on)} on ({', '.join(on)}), "
    line += f"{len(off)} off" + (f" ({'; '.join(off)})" if off else "")
    if line != _line:
        _line = _pending = line
    say_pending()
