# SPDX-License-Identifier: Apache-2.0
"""What a component is: a part of mmcache with a setting of its name, which is switched on and off as a whole.

A component's package says it in its `__init__`, as COMPONENT, without importing vLLM or any module of its own;
lifecycle/registry.py has them all. Any process.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from vllm_mmcache.base.role import ROLES, Role
from vllm_mmcache.hooking.hook import Hook, declared_in, imported

if TYPE_CHECKING:
    from vllm_mmcache.base.status import State


@dataclass(frozen=True)
class Component:
    """One component. Modules are named as seen from its package: "hooks_api"."""

    name: str
    package: str
    hooks: Mapping[Role, tuple[str, ...]]
    """By process, the modules that declare its hooks."""
    rule: str = ""
    """"module:function": what a VllmConfig says of it, as a State or None."""
    on_install: Mapping[Role, str] = field(default_factory=dict)
    """By process, a module with install() and undo(): an extension point of vLLM, or of the component that it needs. It
    is used after its hooks are in."""
    needs: str = ""
    """Another component, without which it can't be on."""
    opt_in: bool = False
    """Whether it is off unless its setting is true."""
    images_only: bool = False
    """Whether it has nothing to do where a deployment takes no images."""
    proven_per: Literal["", "engine", "device"] = ""
    """Where it must have been shown to be exact to be on by default: on each kind of engine, and, where it reads or
    writes tensors on the device, on each platform. Empty for one that works everywhere."""
    on_if: str = ""
    """"if ...": what is known of it only when an engine has loaded its model, for whoever asks before."""
    superseded_by: tuple[str, ...] = ()
    """Symbols of a vLLM that does the same by itself: it steps aside where all of them are there."""
    superseded_if_reads: tuple[str, str] | None = None
    """A symbol of vLLM and a part of a name: it steps aside where the symbol's body reads such a name."""

    def hooks_in(self, role: Role) -> Iterator[Hook]:
        """Its hooks in a process of this role. The modules that declare them are imported as they are asked for.

        Raises: SymbolMissing, then, so that to whoever installs them it is one more reason why they don't fit.
        """
        for name in self.hooks.get(role, ()):
            yield from (hook for hook in declared_in(f"{self.package}.{name}") if hook.process == role)

    def all_hooks(self) -> Iterator[Hook]:
        """Its hooks in all roles, see `hooks_in`."""
        return (hook for role in ROLES for hook in self.hooks_in(role))

    def state_in(self, vllm_config: Any) -> State | None:
        """Why it has nothing to do in a configuration, or can't be in it; None where its rule says neither."""
        if not self.rule:
            return None
        module, _, function = self.rule.partition(":")
        state: State | None = getattr(importlib.import_module(f"{self.package}.{module}"), function)(vllm_config)
        return state

    def extension_in(self, role: Role) -> Any:
        """The module of its extension in a process of this role, None where it has none. Raises: SymbolMissing."""
        name = self.on_install.get(role)
        return None if name is None else imported(f"{self.package}.{name}")
