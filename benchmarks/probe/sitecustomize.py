# SPDX-License-Identifier: Apache-2.0
"""Loaded by every Python process whose PYTHONPATH has this folder: what its imports and the plugin's functions cost.

Each CPU second of a thread belongs to one thing at a time: the module that is being imported, a function of the
plugin's start, or what such a function wraps. When START_COST_FOLDER/ready appears, it writes <pid>.json there. Only
the standard library, and nothing is imported that a process would not import anyway.
"""

import importlib._bootstrap as bootstrap
import os
import sys
import threading
import time
from types import FunctionType, MethodType

PLUGIN = "vllm_mmcache"
STARTS = (f"{PLUGIN}.plugin", f"{PLUGIN}.upstream")  # here all functions are timed, in rooms those that wrap vLLM's
WRAPPER = ("wrapped", "instance", "args", "kwargs")
FUNCTIONS, ROOMS, VLLM = "functions of the plugin", "rooms of the plugin", "wrapped"
POLL_S = 0.1

cpu_s: dict[str, float] = {}  # module or one of these -> own CPU seconds, without what it imports or calls
importer: dict[str, str] = {}  # module -> what was at work when it was first imported
_here = threading.local()


class Span:
    """The CPU time of this thread belongs to `label` until the block ends, apart from spans within."""

    def __init__(self, label: str) -> None:
        self.label = label

    def __enter__(self) -> str:
        """Returns: what was at work before."""
        stack = _here.__dict__.setdefault("stack", [])
        before = stack[-1] if stack else ""
        self._settle(stack)
        stack.append(self.label)
        return before

    def __exit__(self, *error: object) -> None:
        self._settle(_here.stack)
        _here.stack.pop()

    def _settle(self, stack: list[str]) -> None:
        now = time.thread_time()
        if stack:
            cpu_s[stack[-1]] = cpu_s.get(stack[-1], 0.0) + now - _here.since
        _here.since = now


class Timed:
    """A function of the plugin. What it wraps is vLLM's time again. Pickles as the function itself."""

    def __init__(self, function: FunctionType, label: str = FUNCTIONS) -> None:
        self.label = label
        self.__wrapped__ = function
        self.__name__, self.__qualname__ = function.__name__, function.__qualname__
        self.__module__, self.__doc__ = function.__module__, function.__doc__
        self.wraps = is_wrapper(function)

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self.wraps:
            args = (_of_vllm(args[0]), *args[1:])
        with Span(self.label):
            return self.__wrapped__(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> object:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> tuple[object, tuple[object]]:
        return _same, (self.__wrapped__,)


def is_wrapper(function: FunctionType) -> bool:
    """Whether wrapt calls it in the place of a function of vLLM."""
    return function.__code__.co_varnames[: function.__code__.co_argcount] == WRAPPER


def _same(function: object) -> object:
    return function


def _of_vllm(wrapped: object) -> object:
    import wrapt  # the plugin has imported it

    class Wrapped(wrapt.CallableObjectProxy):
        def __call__(self, *args: object, **kwargs: object) -> object:
            with Span(VLLM):
                return self.__wrapped__(*args, **kwargs)

    return Wrapped(wrapped)


def _find_and_load(name: str, import_: object) -> object:
    with Span(name) as before:
        importer.setdefault(name, before)
        module = _find_and_load_unmeasured(name, import_)
    if name.partition(".")[0] == PLUGIN:
        starts = name.startswith(STARTS)
        for attribute, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value.__module__ == name and (starts or is_wrapper(value)):
                setattr(module, attribute, Timed(value, FUNCTIONS if starts else f"{ROOMS}: {name}.{attribute}"))
    return module


def _write_when_ready(folder: str) -> None:
    while not os.path.exists(os.path.join(folder, "ready")):
        time.sleep(POLL_S)
    modules = sorted(sys.modules)
    import json
    import multiprocessing

    found = {
        "name": multiprocessing.current_process().name,
        "modules": modules,
        "plugin": getattr(sys.modules.get(PLUGIN), "__file__", None),
        "cpu_s": dict(cpu_s),
        "importer": dict(importer),
    }
    path = os.path.join(folder, f"{os.getpid()}.json")
    with open(path + ".part", "w") as file:
        json.dump(found, file)
    os.replace(path + ".part", path)


if "START_COST_FOLDER" in os.environ:
    _find_and_load_unmeasured = bootstrap._find_and_load
    bootstrap._find_and_load = _find_and_load
    threading.Thread(target=_write_when_ready, args=(os.environ["START_COST_FOLDER"],), daemon=True).start()
