# SPDX-License-Identifier: Apache-2.0
"""Subclasses of what vLLM's configuration and registry name: found by name, around the user's own, and gone again."""

import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_mmcache.base.errors import HookDisturbed
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.hooking import installer, subclasses
from vllm_mmcache.hooking.subclasses import RendererMixin, SchedulerMixin, WorkerMixin, derived
from vllm_mmcache.lifecycle.registry import table


def test_a_worker_is_found_by_name() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker.cpu_worker import CPUWorker

    def named(worker_cls: str) -> str:
        parallel = SimpleNamespace(worker_cls=worker_cls)
        for _ in range(2):  # a second time changes nothing
            subclasses.use_worker(SimpleNamespace(parallel_config=parallel))
        return parallel.worker_cls

    found: Any = resolve_obj_by_qualname(named("vllm.v1.worker.cpu_worker.CPUWorker"))
    assert found.__mro__[1:3] == (WorkerMixin, CPUWorker)
    assert found is derived(WorkerMixin, CPUWorker)
    assert (found.__name__, found.__module__) == ("CPUWorker", subclasses.__name__)
    assert named("auto") == "auto"
    with pytest.raises(AttributeError):
        resolve_obj_by_qualname(f"{subclasses.__name__}.nothing")


def test_overrides_come_and_go() -> None:
    """Around what the base has, in a class that was derived before; vLLM's own class stays as it is."""
    from vllm.v1.core.sched.scheduler import Scheduler

    class Own(Scheduler):
        def __init__(self) -> None:
            pass

        def make_stats(self, *args: Any, **kwargs: Any) -> Any:
            return SimpleNamespace(ec_connector_stats={"own": 1})

    (hook,) = [member for member in table() if member.name == "metrics.send"]
    before = vars(Scheduler)["make_stats"]
    kind = derived(SchedulerMixin, Own)
    scheduler = kind()
    assert not installer.is_replaced(hook.target)
    assert installer.install("a test", [hook], vllm_version()).state == "on"
    try:
        assert installer.is_replaced(hook.target)
        assert "overridden already" in installer.install("another", [hook], vllm_version()).reason
        assert vars(Scheduler)["make_stats"] is before
        assert "make_stats" in vars(SchedulerMixin)
        assert scheduler.make_stats().ec_connector_stats["own"] == 1
    finally:
        installer.undo("a test")
    assert "make_stats" not in vars(SchedulerMixin)
    assert kind().make_stats().ec_connector_stats == {"own": 1}


def test_renderers_of_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that a third party has registered before; one that comes later is not ours, which the report sees."""
    from vllm.renderers.hf import HfRenderer
    from vllm.renderers.registry import RENDERER_REGISTRY

    stock = ("vllm.renderers.hf", "HfRenderer")
    monkeypatch.setattr(RENDERER_REGISTRY, "renderers", {"hf": stock, "third": stock})
    monkeypatch.setattr(subclasses, "_renderers", {})
    for _ in range(2):
        subclasses.use_renderers()
    RENDERER_REGISTRY.renderers["later"] = stock
    ours: Any = RENDERER_REGISTRY.load_renderer_cls("hf")
    assert ours.__mro__[1:3] == (RendererMixin, HfRenderer)
    assert RENDERER_REGISTRY.load_renderer_cls("third") is ours
    assert RENDERER_REGISTRY.load_renderer_cls("later") is HfRenderer
    assert subclasses.base_of(ours.__new__(ours)) is HfRenderer
    assert subclasses.base_of(object.__new__(HfRenderer)) is HfRenderer
    subclasses.undo()
    assert RENDERER_REGISTRY.renderers == dict.fromkeys(("hf", "third", "later"), stock)


def test_two_components_override_one_method() -> None:
    """The later is called first, each once, and they are undone in any order."""
    from vllm.v1.core.sched.scheduler import Scheduler

    class Own(Scheduler):
        def __init__(self) -> None:
            pass

        def make_stats(self, *args: Any, **kwargs: Any) -> list[str]:
            return []

    def adding(name: str) -> Any:
        return lambda wrapped, instance, args, kwargs: [*wrapped(*args, **kwargs), name]

    (hook,) = [member for member in table() if member.name == "metrics.send"]
    first, second = (replace(hook, name=name, wrapper=adding(name)) for name in ("first", "second"))
    scheduler = derived(SchedulerMixin, Own)()
    assert installer.install("first", [first], vllm_version()).state == "on"
    assert installer.install("second", [second], vllm_version()).state == "on"
    try:
        assert scheduler.make_stats() == ["first", "second"]
        installer.undo("first")
        assert scheduler.make_stats() == ["second"]
        assert installer.install("first", [first], vllm_version()).state == "on"
        assert scheduler.make_stats() == ["second", "first"]
    finally:
        installer.undo("second")
        installer.undo("first")
    assert scheduler.make_stats() == []
    assert "make_stats" not in vars(SchedulerMixin)


def test_what_others_put_on_a_mixin_is_left_alone() -> None:
    """Nothing is installed over it, nor undone below it."""
    (hook,) = [member for member in table() if member.name == "metrics.send"]
    other = replace(hook, name="other")
    assert installer.install("a test", [hook], vllm_version()).state == "on"
    ours = vars(SchedulerMixin)["make_stats"]
    try:
        SchedulerMixin.make_stats = functools.wraps(ours)(lambda self: None)  # type: ignore[attr-defined]
        assert "overridden already" in installer.install("another", [other], vllm_version()).reason
        with pytest.raises(HookDisturbed, match="make_stats"):
            installer.undo("a test")
    finally:
        SchedulerMixin.make_stats = ours  # type: ignore[attr-defined]
        installer.undo("a test")
    assert "make_stats" not in vars(SchedulerMixin)
