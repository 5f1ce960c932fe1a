# SPDX-License-Identifier: Apache-2.0
"""The guard of fast tests and of unit/: a test that starts a process or an engine fails, and says what it started.

Python announces each start of a process to audit hooks (PEP 578), whoever asks for it and in whichever thread. Two
starts are not announced: those of multiprocessing's method `spawn`, and an engine in this process. The first goes
through multiprocessing.util, the second through torch.distributed: each engine of vLLM has a process group.

One start is let through: vLLM looks at a model's class in a process of its own, once on a machine, and keeps what it
saw in its cache directory.
"""

import functools
import importlib
import multiprocessing.util
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

MODEL_INSPECTION = "vllm.model_executor.models.registry"
STARTS = frozenset({"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"})

_refused: list[str] | None = None  # what the guard has refused; None while it is down


def _refuse(what: str) -> None:
    if _refused is not None:
        _refused.append(what)
        pytest.fail(_said(what))


def _said(what: str) -> str:
    return f"a test that may start nothing starts {what[:300]}: see tests/README.md"


def _is_model_inspection(event: str, arguments: tuple[Any, ...]) -> bool:
    return event == "subprocess.Popen" and list(arguments[1])[1:] == ["-m", MODEL_INSPECTION]


def _announced(event: str, arguments: tuple[Any, ...]) -> None:
    if event in STARTS and not _is_model_inspection(event, arguments):
        _refuse(f"a process, {event}{arguments[:2]}")


def _instead(start: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(start)
    def refused(*args: Any, **kwargs: Any) -> Any:
        _refuse(what)
        return start(*args, **kwargs)

    return refused


@functools.cache
def _prepare() -> None:
    """Once in a process, where the guard is first put up: an audit hook can't be taken away."""
    import torch.distributed

    platform.processor()  # Python asks a program for it, once in a process, whoever comes first
    importlib.import_module("cpuinfo")  # vLLM imports it, and its import asks the program `file` about the interpreter
    spawn, join = multiprocessing.util.spawnv_passfds, torch.distributed.init_process_group
    multiprocessing.util.spawnv_passfds = _instead(spawn, "a process, multiprocessing's spawn")
    torch.distributed.init_process_group = _instead(join, "an engine, or joins a process group as one does")
    sys.addaudithook(_announced)


@contextmanager
def no_processes() -> Iterator[None]:
    """Within the block, what starts a process or an engine fails; where its caller catches that, the block fails."""
    global _refused
    _prepare()
    outer, mine = _refused, list[str]()
    _refused = mine
    try:
        yield
    finally:
        _refused = outer
    if mine:
        pytest.fail(_said(mine[0]))
