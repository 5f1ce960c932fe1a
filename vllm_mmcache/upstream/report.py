# SPDX-License-Identifier: Apache-2.0
"""The ledger as it would apply here, for `mmcache doctor`. Runs on the command line; replaces nothing."""

from typing import Any

from vllm_mmcache import settings
from vllm_mmcache.errors import SwapError
from vllm_mmcache.upstream import bodies, swap, vllm_version
from vllm_mmcache.upstream.ledger import groups
from vllm_mmcache.upstream.start import why_alone, why_off


def report() -> list[dict[str, Any]]:
    """One row per ledger entry: group, name, target, state (on, off, refused), reason, body (tested or changed).

    "on" means that this entry resolves and passes its check on the installed vLLM; nothing is replaced here.
    """
    version = vllm_version()
    in_force = settings.current()
    rows: list[dict[str, Any]] = []
    groups_on: set[str] = set()
    for group, members in groups().items():
        reason = why_off(group) or why_alone(group, groups_on)
        state = "off" if reason else "on"
        if not reason:
            try:
                for member in members:
                    if not swap.is_replaced(member.target):
                        swap.check(member, version, allow_untested=in_force.allow_untested_vllm)
            except SwapError as error:
                reason = str(error)
                state = "refused" if any(m.on_mismatch == "refuse" for m in members) else "off"
        if state == "on":
            groups_on.add(group)
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
