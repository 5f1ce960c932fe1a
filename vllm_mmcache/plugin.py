# SPDX-License-Identifier: Apache-2.0
"""The entry point `vllm.general_plugins: mmcache`. vLLM calls `register` in every process, sometimes twice.

Only the standard library is imported here: an ImportError while vLLM loads this module would merely be logged, and
the server would run without us and say nothing. What can fail is imported inside `register`, and passes on.
"""

import os

_TRUE = frozenset({"1", "true", "yes", "on", "t", "y"})


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() in _TRUE


def _asks_for_tenants() -> bool:
    """Whether tenants must be kept apart, which contradicts MMCACHE_DISABLE; reading the settings says so."""
    names = ("MMCACHE_REQUIRE_TENANT", "MMCACHE_REQUIRE_SALT")
    return any(map(_is_set, names)) or os.environ.get("MMCACHE_TENANT_FROM", "cache_salt") not in ("", "cache_salt")


def register() -> None:
    """Install the hooks that see the VllmConfig, with which the rest is decided. A second call changes nothing.

    Raises: SettingsError for a wrong MMCACHE_* variable; HookError where tenants must be kept apart and these hooks
    don't fit.
    """
    if _is_set("MMCACHE_DISABLE") and not _asks_for_tenants():
        return
    import vllm_mmcache.base.background  # noqa: F401  notes the cores before vLLM binds threads to some
    from vllm_mmcache.lifecycle.activation import start

    start()
