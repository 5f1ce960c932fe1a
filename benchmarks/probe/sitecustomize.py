# SPDX-License-Identifier: Apache-2.0
"""Loaded by every Python process whose PYTHONPATH has this folder: what its imports and the plugin's functions cost.

Each CPU second of a thread belongs to one thing at a time: the module that is being imported, a function of the
plugin's start, or what such a function wraps. When START_COST_FOLDER/ready appears, it writes <pid>.json there. Only
the standard library, and nothing is imported that a process would not import anyway.
"""

import functools
import importlib._bootstrap as bootstrap
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

PLUGIN = "vllm_mmcache"
STARTS = (
    f"{PLUGIN}.plugin",
    f"{PLUGIN}.upstream",
)  # here all functions are timed, in components those that wrap vLLM's
WRAPPER = ("wrapped", "instance", "args", "kwargs")
FUNCTIONS, VLLM = f"{PLUGIN}'s functions", "wrapped"
POLL_S = 0.1


class Spans:
    """Seconds by what they are spent on: each second of a thread belongs to the innermost of its blocks."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.spent: Counter[str] = Counter()
        self._clock = clock
        self._here = threading.local()

    def add(self, name: str, number: float) -> None:
        self.spent[name] += number  # type: ignore[assignment]

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """The time of this thread is spent on `name` until the block ends, but for blocks within."""
        stack = self._here.__dict__.setdefault("stack", [])
        self._settle(stack)
        stack.append(name)
        try:
            yield
        finally:
            self._settle(stack)
            stack.pop()

    def _settle(self, stack: list[str]) -> None:
        now = self._clock()
        if stack:
            self.add(stack[-1], now - self._here.since)
        self._here.since = now

    def timed(self, name: str) -> Callable[..., Any]:
        """A wrapper in wrapt's form."""

        def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            with self.of(name):
                return wrapped(*args, **kwargs)

        return wrapper


spans = Spans(time.thread_time)


def timed(function: FunctionType) -> Callable[..., Any]:
    """The same function of the plugin, timed; what it wraps is vLLM's time again."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_wrapper(function):
            import wrapt  # the plugin has imported it

            args = (wrapt.FunctionWrapper(args[0], spans.timed(VLLM)), *args[1:])
        with spans.of(FUNCTIONS):
            return function(*args, **kwargs)

    wrapper.is_timed = True  # type: ignore[attr-defined]
    return wrapper


def is_wrapper(function: FunctionType) -> bool:
    """Whether wrapt calls it in the place of a function of vLLM."""
    return function.__code__.co_varnames[: function.__code__.co_argcount] == WRAPPER


def find_and_load(name: str, import_: object) -> object:
    """Python's own, and the plugin's functions are timed as soon as their module is there."""
    with spans.of(name):
        module = unmeasured(name, import_)
    if name.partition(".")[0] == PLUGIN:
        for attribute, value in list(vars(module).items()):
            is_own = isinstance(value, FunctionType) and value.__module__ == name and not hasattr(value, "is_timed")
            if is_own and (name.startswith(STARTS) or is_wrapper(value)):
                setattr(module, attribute, timed(value))
    return module


def write_when_ready(folder: str) -> None:
    while not os.path.exists(os.path.join(folder, "ready")):
        time.sleep(POLL_S)
    cpu_s, plugin = dict(spans.spent), getattr(sys.modules.get(PLUGIN), "__file__", None)
    import json
    import multiprocessing

    path = os.path.join(folder, f"{os.getpid()}.json")
    with open(path + ".part", "w") as file:
        json.dump({"name": multiprocessing.current_process().name, "plugin": plugin, "cpu_s": cpu_s}, file)
    os.replace(path + ".part", path)


if "START_COST_FOLDER" in os.environ:
    unmeasured = bootstrap._find_and_load  # type: ignore[attr-defined]  # importlib's own, in no stub
    bootstrap._find_and_load = find_and_load  # type: ignore[attr-defined]
    threading.Thread(target=write_when_ready, args=(os.environ["START_COST_FOLDER"],), daemon=True).start()
