# SPDX-License-Identifier: Apache-2.0
"""vLLM's classes that a configuration may name: what mmcache changes in them goes into a subclass, not into them.

The engine process names a subclass of the configuration's own scheduler class (`scheduler_cls`), and one of its worker
class (`worker_cls`), which travels to the workers as a name; the API process names one of each renderer in vLLM's
registry. Each derives from a mixin here first, then from that class. A hook whose owner is in MIXINS becomes a
method of the mixin (installer.py), so it can come and go while instances live; without one a subclass does what
its base does.
"""

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any


class SchedulerMixin:
    """Before vLLM's Scheduler, or the AsyncScheduler, or the user's own. Engine process."""


class WorkerMixin:
    """Before vLLM's Worker of the platform, or the user's own. Worker process."""


class RendererMixin:
    """Before the renderer of the model's kind, vLLM's or a third party's. API process."""


MIXINS: dict[str, type] = {
    "vllm.v1.core.sched.scheduler:Scheduler": SchedulerMixin,
    "vllm.v1.worker.gpu_worker:Worker": WorkerMixin,
    "vllm.v1.worker.worker_base:WorkerBase": WorkerMixin,
    "vllm.renderers.base:BaseRenderer": RendererMixin,
}

_renderers: dict[str, tuple[str, str]] = {}  # mode -> what the registry held before


def mixin_for(target: str) -> type | None:
    """The mixin that stands for the owner of "module:Owner.attr"; None where vLLM's own object is replaced."""
    return MIXINS.get(target.rpartition(".")[0])


def use_worker(vllm_config: Any) -> None:
    """Name the worker's subclass. Engine process, before the workers are made from the configuration."""
    parallel = vllm_config.parallel_config
    if "." in parallel.worker_cls and not parallel.worker_cls.startswith(f"{__name__}."):
        parallel.worker_cls = f"{__name__}.{_name(WorkerMixin, parallel.worker_cls)}"


def use_scheduler(vllm_config: Any) -> None:
    """Name the scheduler's subclass. Engine process, when the workers are there and before the scheduler is.

    One that is not vLLM's Scheduler, nor derived from it, stays: what we override is that one's.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    base = vllm_config.scheduler_config.get_scheduler_cls()
    if issubclass(base, Scheduler) and not issubclass(base, SchedulerMixin):
        vllm_config.scheduler_config.scheduler_cls = derived(SchedulerMixin, base)


def use_renderers() -> None:
    """Name a subclass of each renderer in vLLM's registry. API process, before its renderer is made; re-entrant."""
    from vllm.renderers.registry import RENDERER_REGISTRY

    for mode, (module, name) in list(RENDERER_REGISTRY.renderers.items()):
        if module != __name__:
            _renderers[mode] = module, name
            RENDERER_REGISTRY.renderers[mode] = __name__, _name(RendererMixin, f"{module}.{name}")


@contextlib.contextmanager
def vllms_renderers() -> Iterator[None]:
    """A renderer that is made in the block is vLLM's own, or a third party's. Not for several threads."""
    from vllm.renderers.registry import RENDERER_REGISTRY

    ours = {mode: RENDERER_REGISTRY.renderers[mode] for mode in _renderers}
    RENDERER_REGISTRY.renderers.update(_renderers)
    try:
        yield
    finally:
        RENDERER_REGISTRY.renderers.update(ours)


def undo() -> None:
    """Give the registry back what it held. What a configuration names stays: it is one engine's."""
    if _renderers:
        from vllm.renderers.registry import RENDERER_REGISTRY

        RENDERER_REGISTRY.renderers.update(_renderers)
        _renderers.clear()


def base_of(instance: Any) -> type:
    """The class that an object would have without us."""
    kind = type(instance)
    return kind.__bases__[1] if kind.__module__ == __name__ else kind


def bypass(instance: Any, methods: tuple[str, ...], is_bypassed: bool) -> None:
    """Call an object's methods as they would be without us, or no longer: for hot ones, while ours have nothing to do.

    An object of another class than ours is left as it is.
    """
    kind = type(instance)
    own = vars(instance)
    if kind.__module__ != __name__ or is_bypassed == (methods[0] in own):
        return
    for name in methods:
        if is_bypassed:
            own[name] = getattr(super(kind.__bases__[0], instance), name)
        else:
            del own[name]


@functools.cache
def derived(mixin: type, base: type) -> type:
    """The one class that derives from both. It has the base's name, and this module's."""
    return type(base.__name__, (mixin, base), {"__module__": __name__, "__doc__": mixin.__doc__})


def _name(mixin: type, base: str) -> str:
    """The name of a subclass as this module's __getattr__ reads it, without a dot: the mixin's, then the base's."""
    return f"{mixin.__name__}:{base.replace('.', ':')}"


def __getattr__(name: str) -> type:
    """The subclass of a name that `_name` made."""
    mixin, _, base = name.partition(":")
    if not base:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = base.replace(":", ".").rpartition(".")
    return derived(globals()[mixin], getattr(importlib.import_module(module), attribute))
