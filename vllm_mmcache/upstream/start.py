# SPDX-License-Identifier: Apache-2.0
"""What `plugin.register` does: settings, then each group of the ledger, then one line about it per process."""

import logging
import multiprocessing

from vllm_mmcache import __version__, settings
from vllm_mmcache.errors import SwapError
from vllm_mmcache.upstream import swap, vllm_version
from vllm_mmcache.upstream.ledger import groups

logger = logging.getLogger("vllm.mmcache")

_last_line: str | None = None


def start() -> list[swap.Outcome]:
    """Install every group that is switched on and fits. Returns the outcomes; re-entrant.

    Raises: SettingsError; SwapError where a group must not be missing.
    """
    in_force = settings.current()
    version = vllm_version()
    outcomes = []
    for group, members in groups().items():
        if not getattr(in_force, group, True):
            outcomes.append(swap.Outcome(group, "off", f"switched off by the setting {group}"))
            continue
        outcomes.append(swap.install(group, members, version, allow_untested=in_force.allow_untested_vllm))
    for outcome in outcomes:
        if outcome.state == "refused":
            swap.undo_all()
            raise SwapError(
                f"mmcache refuses to start, since answers could be wrong without {outcome.group}: "
                f"{outcome.reason}. MMCACHE_DISABLE=1 runs vLLM as it is."
            )
    _say(version, outcomes)
    return outcomes


def process_name() -> str:
    """api (or the offline program), engine or worker, by the name that vLLM gives its processes."""
    name = multiprocessing.current_process().name.lower()
    if "enginecore" in name or "engine_core" in name:
        return "engine"
    if "worker" in name:
        return "worker"
    return "api"


def _say(version: str, outcomes: list[swap.Outcome]) -> None:
    global _last_line
    on = [outcome.group for outcome in outcomes if outcome.state == "on"]
    off = [f"{outcome.group}: {outcome.reason}" for outcome in outcomes if outcome.state != "on"]
    line = f"mmcache {__version__} on vLLM {version} [{process_name()}]: {len(on)} on ({', '.join(on)}), {len(off)} off"
    if off:
        line += f" ({'; '.join(off)})"
    if line != _last_line:
        _last_line = line
        logger.info(line)
