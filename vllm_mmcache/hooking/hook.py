# SPDX-License-Identifier: Apache-2.0
"""The declaration of a hook, which stands on the function that replaces a symbol of vLLM.

    hook = Hooks("image_spans", "engine", upstream="none yet", remove_when="vLLM never splits such a span")

    @hook("vllm.v1.core.sched.scheduler:Scheduler.schedule", name="turns", args=("throttle_prefills",), why="...")
    def schedule_fairly(wrapped, instance, args, kwargs): ...

The function is a wrapt wrapper and stays as it is: nothing is replaced before installer.py is asked to. One function
can be declared for several symbols. Any process; imports nothing of vLLM.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, TypeVar

from vllm_mmcache.base.errors import SymbolMissing
from vllm_mmcache.base.role import Role

TESTED_VLLM = ">=0.32.0,<0.34"
"""The vLLM that hooks are written for: a PEP 440 range with both ends."""

Only = Literal["", "runner V1", "pipeline stages"]
Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])

_declared: dict[str, dict[str, Hook]] = {}  # module -> name -> hook, in the order of the declarations


@dataclass(frozen=True)
class Hook:
    """One symbol of vLLM that is replaced, or overridden in a subclass (subclasses.py).

    target and also are "module:Owner.attr"; also lists from-import aliases that must change with the target. wrapper is
    called as (wrapped, instance, args, kwargs).
    """

    name: str
    """The component's, a dot and its own."""
    component: str
    target: str
    wrapper: Callable[..., Any]
    process: Role
    args_used: tuple[str, ...]
    """Arguments of the symbol that the wrapper reads; they must be there."""
    why: str
    upstream: str
    """Issues or proposals of vLLM, or that there are none."""
    remove_when: str
    also: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    """Private symbols of vLLM that the wrapper calls, or replaces on an object; they must be there."""
    only: Only = ""
    """A configuration without it does not need this hook."""


class Hooks:
    """Declares the hooks of a module: those of one component, in one process where a hook names no other.

    What is given here holds for every hook that does not say it itself.
    """

    def __init__(
        self, component: str, process: Role, *, why: str = "", upstream: str = "", remove_when: str = ""
    ) -> None:
        self._component = component
        self._process = process
        self._why = why
        self._upstream = upstream
        self._remove_when = remove_when

    def __call__(
        self,
        target: str,
        *,
        name: str,
        process: Role | None = None,
        args: tuple[str, ...] = (),
        also: tuple[str, ...] = (),
        reads: tuple[str, ...] = (),
        only: Only = "",
        why: str = "",
        upstream: str = "",
        remove_when: str = "",
    ) -> Callable[[Wrapper], Wrapper]:
        """A decorator that declares the function as the wrapper of `target`, and returns it unchanged.

        Raises: ValueError where the function's module has declared another hook of this name. A module that is imported
        anew may declare the same function again.
        """

        def declare(wrapper: Wrapper) -> Wrapper:
            declared = Hook(
                name=f"{self._component}.{name}",
                component=self._component,
                target=target,
                wrapper=wrapper,
                process=process or self._process,
                args_used=args,
                why=why or self._why,
                upstream=upstream or self._upstream,
                remove_when=remove_when or self._remove_when,
                also=also,
                reads=reads,
                only=only,
            )
            in_module = _declared.setdefault(wrapper.__module__, {})
            known = in_module.get(declared.name)
            if known is not None and _declaration_of(known) != _declaration_of(declared):
                raise ValueError(f"{declared.name} is declared twice in {wrapper.__module__}")
            in_module[declared.name] = declared
            return wrapper

        return declare


def declared_in(module: str) -> list[Hook]:
    """The hooks that a module declares; imports it, and with it what it needs of vLLM. Raises: SymbolMissing."""
    imported(module)
    return list(_declared.get(module, {}).values())


def imported(module: str) -> ModuleType:
    """A module of mmcache. Raises: SymbolMissing, where this vLLM lacks something that it imports."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SymbolMissing(f"{module} can't be imported ({error})") from error


def _declaration_of(hook: Hook) -> tuple[str, str, Role]:
    """What stays the same of a hook when its module is imported anew, though the function is another object."""
    return hook.wrapper.__qualname__, hook.target, hook.process
