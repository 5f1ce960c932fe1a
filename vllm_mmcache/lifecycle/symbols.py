# SPDX-License-Identifier: Apache-2.0
"""The table of hooks as it fits here, for `mmcache doctor --symbols`. Runs on the command line; replaces nothing."""

from typing import Any

from vllm_mmcache.base import settings
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.hooking import installer, source_digests
from vllm_mmcache.lifecycle.registry import table_here


def symbols() -> list[dict[str, Any]]:
    """A row per hook: group, name, target, process, misfit (empty where it fits), body (tested or changed).

    A body is that of the target, and of the functions that the hook reads. What a module declares that can't be
    imported with this vLLM is left out.
    """
    hooks, _ = table_here()
    version = vllm_version()
    untested = settings.current().allow_untested_vllm
    return [
        {
            "group": member.component,
            "name": member.name,
            "target": member.target,
            "process": member.process,
            "misfit": installer.incompatibility([member], version, allow_untested=untested),
            "body": source_digests.compare_all_installed((member.target, *member.reads), version),
        }
        for member in hooks
    ]
