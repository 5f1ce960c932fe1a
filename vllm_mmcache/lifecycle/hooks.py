# SPDX-License-Identifier: Apache-2.0
"""Sees the VllmConfig in each process: what it says of us is put in force, and the process takes its role on.

API process: after the VllmConfig is made, so that a wrong value stops the start; what is in force is laid beside it,
and travels with it. Engine and worker processes: before the executor or the worker is built from what was handed to
them. One process can be all three.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from vllm_mmcache.base import config_payload, settings, status
from vllm_mmcache.base.arguments import argument
from vllm_mmcache.hooking import subclasses
from vllm_mmcache.hooking.hook import Hooks
from vllm_mmcache.lifecycle import activation, config_rules, rank_sync, tested_engines

_seen: list[Any] = []  # the last configuration that this process has made: what it says of us, and of the engine
_from_command_line: settings.Settings | None = None
_depth = 0  # executors and workers that are being built: they make configurations for parts of a model


hook = Hooks(
    "settings",
    "api",
    why=(
        "a general plugin gets no configuration; the `mmcache` part of --additional-config must be checked and put in "
        "force in each process before a component reads a setting"
    ),
    upstream="none: no public hook hands VllmConfig to a general plugin",
    remove_when="general plugins are handed the VllmConfig",
)


@hook(
    "vllm.config.vllm:VllmConfig.__post_init__",
    name="api",
)
def read_after_config(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of VllmConfig.__post_init__. Raises: SettingsError for an unknown or wrong value; HookError."""
    outcome = wrapped(*args, **kwargs)
    if not config_rules.is_of_an_engine(instance) or _depth or status.process_name() != "api":
        return outcome
    _read(instance)
    said = [settings.current(), tested_engines.engine_here(instance), instance.model_config.model]
    if "api" not in status.roles() or said != _seen:  # vLLM makes some more than once
        _seen[:] = said
        activation.activate("api", instance)
    subclasses.use_renderers()
    config_payload.carry(instance, settings.current())
    return outcome


@hook(
    "vllm.v1.executor.abstract:Executor.__init__",
    name="engine",
    process="engine",
    args=("vllm_config",),
)
def build_executor(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Wrapper of Executor.__init__(vllm_config): the process schedules. When the workers are there, all ranks agree."""
    vllm_config = argument(wrapped, args, kwargs, "vllm_config")
    _receive(vllm_config)
    config_payload.carry(vllm_config, settings.current())  # where it was made without us
    activation.activate("engine", vllm_config)
    subclasses.use_worker(vllm_config)
    with _building():
        outcome = wrapped(*args, **kwargs)
    rank_sync.synchronize(instance, vllm_config)
    subclasses.use_scheduler(vllm_config)
    return outcome


@hook(
    "vllm.v1.worker.worker_base:WorkerBase.__init__",
    name="worker",
    process="worker",
    args=("vllm_config",),
)
def build_worker(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Override of WorkerBase.__init__(vllm_config): the process runs the model."""
    vllm_config = argument(wrapped, args, kwargs, "vllm_config")
    _receive(vllm_config)
    activation.activate("worker", vllm_config)
    return wrapped(*args, **kwargs)


def _read(vllm_config: Any) -> None:
    """Lay what the command line says over the variables; of an engine that was here before, nothing stays."""
    global _from_command_line
    part = settings.config_of(vllm_config)
    if part or settings.current() is _from_command_line:
        _from_command_line = settings.load_settings(part)
        settings.use(_from_command_line)


def _receive(vllm_config: Any) -> None:
    if "api" not in status.roles() and (given := config_payload.carried(vllm_config)) is not None:
        settings.use(settings.received(given))


@contextlib.contextmanager
def _building() -> Iterator[None]:
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
