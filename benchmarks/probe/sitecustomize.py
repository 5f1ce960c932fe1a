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

PLUGIN = "vllm_mmcache"
STARTS = (f"{PLUGIN}.plugin", f"{PLUGIN}.upstream")  # here all functions are timed, in rooms those that wrap vLLM's
WRAPPER = ("wrapped", "instance", "args", "kwargs")
FUNCTIONS, ROOMS, VLLM = "functions of the plugin", "rooms of the plugin", "wrapped"
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


spans = Spans(time.thread_time)


def timed(function: Callable[..., object], name: str) -> Callable[..., object]:
    """The same function, its time spent on `name`; what it wraps is vLLM's time again."""

    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> object:
        if is_wrapper(function):
            import wrapt  # the plugin has imported it

            args = (wrapt.FunctionWrapper(args[0], of_vllm), *args[1:])
        with spans.of(name):
            return function(*args, **kwargs)

    wrapper.is_timed = True  # type: ignore[attr-defined]
    return wrapper


def is_wrapper(function: Callable[..., object]) -> bool:
    """Whether wrapt calls it in the place of a function of vLLM."""
    code = function.__code__
    return code.co_varnames[: code.co_argcount] == WRAPPER


def of_vllm(wrapped: Callable[..., object], instance: object, args: tuple[object], kwargs: dict[str, object]) -> object:
    with spans.of(VLLM):
        return wrapped(*args, **kwargs)


def find_and_load(name: str, import_: object) -> object:
    """Python's own, and the plugin's functions are timed as soon as their module is there."""
    with spans.of(name):
        module = unmeasured(name, import_)
    if name.partition(".")[0] == PLUGIN:
        starts = name.startswith(STARTS)
        for attribute, value in list(vars(module).items()):
            is_own = isinstance(value, FunctionType) and value.__module__ == name and not hasattr(value, "is_timed")
            if is_own and (starts or is_wrapper(value)):
                setattr(module, attribute, timed(value, FUNCTIONS if starts else ROOMS))
    return module


def write_when_ready(folder: str) -> None:
    while not os.path.exists(os.path.join(folder, "ready")):
        time.sleep(POLL_S)
    modules = sorted(sys.modules)
    import json
    import multiprocessing

    plugin = getattr(sys.modules.get(PLUGIN), "__file__", None)
    name = multiprocessing.current_process().name
    path = os.path.join(folder, f"{os.getpid()}.json")
    with open(path + ".part", "w") as file:
        json.dump({"name": name, "modules": modules, "plugin": plugin, "cpu_s": dict(spans.spent)}, file)
    os.replace(path + ".part", path)


if "START_COST_FOLDER" in os.environ:
    unmeasured = bootstrap._find_and_load
    bootstrap._find_and_load = find_and_load
    threading.Thread(target=write_when_ready, args=(os.environ["START_COST_FOLDER"],), daemon=True).start()
