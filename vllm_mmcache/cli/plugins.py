# SPDX-License-Identifier: Apache-2.0
"""Which plugins vLLM loads, and whether mmcache is one of them. On the command line; imports no vLLM."""

import importlib.metadata
import os

NAME = "mmcache"
ENDPOINT = "mmcache_observe"
VARIABLE = "VLLM_PLUGINS"
# vLLM's groups of plugins that it loads unless VLLM_PLUGINS leaves them out. Endpoints it loads only if named there.
GROUPS = ("general", "io_processor", "platform", "stat_logger")


def loaded() -> list[str]:
    """The names that vLLM loads: those of VLLM_PLUGINS, or all that are installed, endpoints left out."""
    if (named := os.environ.get(VARIABLE)) is not None:
        return named.split(",")
    found = [importlib.metadata.entry_points(group=f"vllm.{group}_plugins") for group in GROUPS]
    return list(dict.fromkeys(plugin.name for group in found for plugin in group))


def why_left_out() -> str:
    """Why vLLM does not load mmcache, so that nothing of it runs in any process; empty where it does."""
    if NAME in loaded():
        return ""
    if (named := os.environ.get(VARIABLE)) is not None:
        return f"{VARIABLE}={named} leaves {NAME} out"
    return f"the distribution vllm-{NAME} is not installed in this environment"
