# SPDX-License-Identifier: Apache-2.0
"""vLLM's classes that a configuration may name: what mmcache changes in them goes into a subclass, not into them.

The engine process names a subclass of the configuration's own scheduler class (`scheduler_cls`), and one of its worker
class (`worker_cls`), which travels to the workers as a name. Each derives from a mixin here first, then from that
class. A hook of the ledger whose owner is in MIXINS becomes a method of the mixin (hooks.py), so it can come and go
while instances live; without hooks a subclass does what its base does.
"""

import functools
import importlib
from typing import Any


class SchedulerMixin:
    """Before vLLM's Scheduler, or the AsyncScheduler, or the user's own. Engine process."""


class WorkerMixin:
    """Before vLLM's Worker of the platform, or the user's own. Worker process."""


MIXINS: dict[str, type] = {
    "vllm.v1.core.sched.scheduler:Scheduler": SchedulerMixin,
    "vllm.v1.worker.gpu_worker:Worker": WorkerMixin,
    "vllm.v1.worker.worker_base:WorkerBase": WorkerMixin,
}


def mixin_for(target: str) -> type | None:
    """The mixin that stands for the owner of "module:Owner.attr"; None where vLLM's own object is replaced."""
    return MIXINS.get(target.rpartition(".")[0])


def use(vllm_config: Any) -> None:
    """Name the worker's subclass. Engine process, before the workers are made from the configuration."""
    parallel = vllm_config.parallel_config
    if "." in parallel.worker_cls and not parallel.worker_cls.startswith(f"{__name__}."):
        parallel.worker_cls = f"{__name__}.{parallel.worker_cls.replace('.', ':')}"


def use_scheduler(vllm_config: Any) -> None:
    """Name the scheduler's subclass. Engine process, when the workers are there and before the scheduler is."""
    base = vllm_config.scheduler_config.get_scheduler_cls()
    if not issubclass(base, SchedulerMixin):
        vllm_config.scheduler_config.scheduler_cls = derived(SchedulerMixin, base)


@functools.cache
def derived(mixin: type, base: type) -> type:
    """The one class that derives from both. It has the base's name, and this module's."""
    return type(base.__name__, (mixin, base), {"__module__": __name__, "__doc__": mixin.__doc__})


def __getattr__(name: str) -> type:
    """The worker's subclass by the name that `use` gave: the base's full name with colons."""
    module_name, _, base = name.rpartition(":")
    if not module_name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return derived(WorkerMixin, getattr(importlib.import_module(module_name.replace(":", ".")), base))
