# SPDX-License-Identifier: Apache-2.0
"""What travels with a VllmConfig from process to process: the settings. Any process."""

from collections import OrderedDict
from typing import Any

from vllm_mmcache.base import settings

_CARRIED = "mmcache_settings"  # an attribute of an additional_config


def carry(vllm_config: Any, chosen: settings.Settings) -> None:
    """Lay all that was set beside a configuration, so that every process that gets it has it.

    Also where nothing was set: a configuration without it comes from a process that is without us. What it says stays
    as it is, and so does vLLM's hash of it, which clients see. An OrderedDict keeps an attribute when it is pickled,
    and any process can read it.
    """
    if isinstance(vllm_config.additional_config, dict):
        beside = OrderedDict(vllm_config.additional_config)
        vars(beside)[_CARRIED] = settings.carried(chosen)
        vllm_config.additional_config = beside


def carried(vllm_config: Any) -> dict[str, Any] | None:
    """What a process with mmcache has laid beside a configuration; None where none has."""
    found: dict[str, Any] | None = getattr(vllm_config.additional_config, _CARRIED, None)
    return found
