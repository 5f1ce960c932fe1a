# SPDX-License-Identifier: Apache-2.0
"""Everything that ties mmcache to one range of vLLM versions: the ledger of swaps and the machine that applies it."""

from typing import Any


def vllm_version() -> str:
    """The installed vLLM's own version, whatever its distribution is called. Raises: ImportError."""
    from vllm.version import __version__  # light: reads one generated file, but runs vllm/__init__

    return str(__version__)


def unwanted(group: str) -> str:
    """Why the settings or the platform leave a group off here; empty if they ask for it."""
    from vllm_mmcache import settings
    from vllm_mmcache.upstream.start import why_off

    return "MMCACHE_DISABLE is set" if settings.current().disable else why_off(group)


def report() -> list[dict[str, Any]]:
    """One row per ledger entry: group, name, target, state (on, off, refused), reason, body (tested or changed).

    "on" means that this entry resolves and passes its check on the installed vLLM; nothing is replaced here.
    """
    from vllm_mmcache import settings
    from vllm_mmcache.errors import SwapError
    from vllm_mmcache.upstream import bodies, swap
    from vllm_mmcache.upstream.ledger import groups

    version = vllm_version()
    in_force = settings.current()
    rows: list[dict[str, Any]] = []
    for group, members in groups().items():
        reason = unwanted(group)
        state = "off" if reason else "on"
        if not reason:
            try:
                for member in members:
                    if not swap.is_replaced(member.target):
                        swap.check(member, version, allow_untested=in_force.allow_untested_vllm)
            except SwapError as error:
                reason = str(error)
                state = "refused" if any(m.on_mismatch == "refuse" for m in members) else "off"
        rows += [
            {
                "group": group,
                "name": member.name,
                "target": member.target,
                "state": state,
                "reason": reason,
                "body": bodies.compare_installed(member.target, version),
            }
            for member in members
        ]
    return rows
