# SPDX-License-Identifier: Apache-2.0
"""The arguments of a wrapped call by their names, however the caller passed them. Any process; imports no vLLM."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any


def argument(wrapped: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """The value that a call gives the argument `name` of the function, or bound method, that is wrapped.

    Its default, where the call does not give it. A method of somebody's subclass may take *args: then the names are
    those of the method that it overrides. Raises: KeyError where there is no such argument.
    """
    if name in kwargs:
        return kwargs[name]
    for parameters in _signatures(wrapped):
        if name in parameters:
            position = list(parameters).index(name)
            return args[position] if position < len(args) else parameters[name].default
    raise KeyError(name)


def named(wrapped: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All that a call gives, by name, to call `wrapped(**named)`; defaults are left to it."""
    for parameters in _signatures(wrapped):
        if not any(one.kind is one.VAR_POSITIONAL for one in parameters.values()):
            return {**dict(zip(parameters, args, strict=False)), **kwargs}
    raise KeyError(f"{wrapped} names no arguments")


def _signatures(wrapped: Callable[..., Any]) -> Iterator[Mapping[str, inspect.Parameter]]:
    """The parameters of a function; of a bound method without self, then of those that it overrides."""
    instance = getattr(wrapped, "__self__", None)
    if instance is None:
        yield _parameters(wrapped, False)
        return
    yield _parameters(wrapped.__func__, True)  # type: ignore[attr-defined]
    for base in type(instance).__mro__:
        if inspect.isfunction(function := vars(base).get(wrapped.__name__)):
            yield _parameters(function, True)


@cache
def _parameters(function: Callable[..., Any], has_self: bool) -> dict[str, inspect.Parameter]:
    found = list(inspect.signature(function).parameters.values())
    return {one.name: one for one in found[has_self:]}
