# SPDX-License-Identifier: Apache-2.0
"""All components, and the table of all hooks, which start, doctor, docs, checks and tests read.

A component's package says what it is (COMPONENT), and its hooks stand on the functions that replace symbols of vLLM.
A vLLM that a component does not fit runs without it, and is then as wrong or right there as it is without us. Any
process; the table of hooks imports vLLM.
"""

import importlib
from functools import cache

from vllm_mmcache.base.errors import SymbolMissing
from vllm_mmcache.base.role import ROLES, Role
from vllm_mmcache.hooking.component import Component
from vllm_mmcache.hooking.hook import Hook, declared_in

# In the order in which they are decided on and installed: what a component needs comes before it, and of two that
# override one method the later is called first.
_PACKAGES = (
    "vllm_mmcache.components.block_keys",
    "vllm_mmcache.components.image_spans",
    "vllm_mmcache.components.resumed_images",
    "vllm_mmcache.components.image_checkpoints",
    "vllm_mmcache.components.inner_checkpoints",
    "vllm_mmcache.components.features",
    "vllm_mmcache.metrics",
    "vllm_mmcache.components.lazy_media",
    "vllm_mmcache.components.image_extraction",
    "vllm_mmcache.components.identity",
    "vllm_mmcache.components.lazy_processing",
    "vllm_mmcache.components.observe",
)

# No components, since they have no settings: these hooks are there wherever a component is.
FIRST = Component("settings", "vllm_mmcache.lifecycle", dict.fromkeys(ROLES, ("hooks",)))
"""Sees the VllmConfig: installed when the plugin is registered. All else follows when it is seen."""
REPORT = Component("report", "vllm_mmcache.lifecycle", {"api": ("report", "middleware"), "engine": ("rank_sync",)})
"""Tells what is in force, on wherever a component is."""

TRIAL = Component("trial", "vllm_mmcache.lifecycle", {"engine": ("trial_hooks",)})
"""Tries components on the engine while it starts, on where one is not proven."""
AUDIT = Component("audit", "vllm_mmcache.audit", {"engine": ("hooks",)})
"""Computes a share of the requests anew: installed only where its setting asks for it."""

KV_EVENTS = Component("kv_events", "vllm_mmcache.components.identity", {"engine": ("hooks_events",)})
"""Publishes KV events in the form that a router reads: installed only where its settings ask for one."""

COMPONENTS: dict[str, Component] = {
    component.name: component for component in (importlib.import_module(name).COMPONENT for name in _PACKAGES)
}
COMPONENT_NAMES = tuple(COMPONENTS)


def parts(role: Role) -> dict[str, Component]:
    """The components with hooks in a process of this role, by name."""
    return {name: component for name, component in COMPONENTS.items() if component.hooks.get(role)}


def with_needed(component: str) -> tuple[str, ...]:
    """A component after the one that it needs, if any."""
    needed = COMPONENTS[component].needs
    return (needed, component) if needed else (component,)


_EVERYTHING = (FIRST, REPORT, TRIAL, AUDIT, KV_EVENTS, *COMPONENTS.values())


@cache
def table() -> tuple[Hook, ...]:
    """Every symbol of vLLM that is replaced or overridden; imports all that declares one. Raises: SymbolMissing."""
    return tuple(hook for component in _EVERYTHING for hook in component.all_hooks())


def table_here() -> tuple[list[Hook], dict[str, str]]:
    """The hooks in modules that can be imported with this vLLM; and, by component, why another module can't be."""
    hooks: list[Hook] = []
    missing: dict[str, str] = {}
    for component in _EVERYTHING:
        for role, names in component.hooks.items():
            for name in names:
                try:
                    hooks += [hook for hook in declared_in(f"{component.package}.{name}") if hook.process == role]
                except SymbolMissing as error:
                    missing[component.name] = str(error)
    return hooks, missing
