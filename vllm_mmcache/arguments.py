# SPDX-License-Identifier: Apache-2.0
"""The arguments of a wrapped call by their names, however the caller passed them. Any process; imports no vLLM."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any


def argument(wrapped: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """The value that a call gives the argument `name` of the function, or bound method, that is wrapped.

    Its default, where the call does not give it. Raises: KeyError where the function has no such argument.
    """
    if name in kwargs:
        return kwargs[name]
    parameters = _parameters(getattr(wrapped, "__func__", wrapped))
    index, default = parameters[name]
    index -= getattr(wrapped, "__self__", None) is not None
    return args[index] if index < len(args) else default


def named(wrapped: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All that a call gives, by name, to call `wrapped(**named)`; defaults are left to it."""
    names = list(_parameters(getattr(wrapped, "__func__", wrapped)))
    names = names[getattr(wrapped, "__self__", None) is not None :]
    return {**dict(zip(names, args, strict=False)), **kwargs}


@cache
def _parameters(function: Callable[..., Any]) -> dict[str, tuple[int, Any]]:
    """Name -> position, self included, and default."""
    found = inspect.signature(function).parameters.values()
    return {one.name: (index, one.default) for index, one in enumerate(found)}
