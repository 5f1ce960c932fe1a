# SPDX-License-Identifier: Apache-2.0
"""The arguments of a wrapped call by their names, however the caller passed them. Any process; imports no vLLM."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any


def argument(wrapped: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """The value that a call gives the argument `name` of the function, or bound method, that is wrapped.

    Its default, where the call does not give it. A method of somebody's subclass may take *args: then the names are
    those of the method that it overrides. Raises: KeyError where there is no such argument.
    """
    if name in kwargs:
        return kwargs[name]
    position, default = _place(*_called(wrapped), name)
    return args[position] if position < len(args) else default


def named(wrapped: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All that a call gives, by name, to call `wrapped(**named)`; defaults are left to it."""
    for parameters in _signatures(*_called(wrapped)):
        if not any(one.kind is one.VAR_POSITIONAL for one in parameters.values()):
            return {**dict(zip(parameters, args, strict=False)), **kwargs}
    raise KeyError(f"{wrapped} names no arguments")


def _called(wrapped: Callable[..., Any]) -> tuple[Callable[..., Any], type | None]:
    """A function; of a bound method its function, and the class of the object."""
    instance = getattr(wrapped, "__self__", None)
    return (wrapped, None) if instance is None else (wrapped.__func__, type(instance))  # type: ignore[attr-defined]


@cache
def _place(function: Callable[..., Any], kind: type | None, name: str) -> tuple[int, Any]:
    """Position and default of an argument; asked for every request in every step. Raises: KeyError."""
    for parameters in _signatures(function, kind):
        if name in parameters:
            return list(parameters).index(name), parameters[name].default
    raise KeyError(name)


@cache
def _signatures(function: Callable[..., Any], kind: type | None) -> tuple[dict[str, inspect.Parameter], ...]:
    """The parameters of a function; of a method without self, then of those that it overrides."""
    overridden = [vars(base).get(function.__name__) for base in kind.__mro__] if kind is not None else []
    called: list[Any] = [function, *filter(inspect.isfunction, overridden)]
    each = (list(inspect.signature(one).parameters.values())[kind is not None :] for one in called)
    return tuple({parameter.name: parameter for parameter in found} for found in each)
