# SPDX-License-Identifier: Apache-2.0
"""Registered classes are their parents in all that vLLM reads; classes of others are left alone, and asked."""

import pickle
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor.model_loader import utils
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.registry import _ModelInfo

from vllm_mmcache.models import vllm_classes, vllm_registry
from vllm_mmcache.models.facts import FACTS, Gemma3
from vllm_mmcache.models.protocol import ATTRIBUTE

GEMMA = "Gemma3ForConditionalGeneration"


@pytest.fixture(autouse=True)
def registered() -> Iterator[list[str]]:
    """The classes are registered, and what was there before is there again afterwards."""
    models, parents = dict(ModelRegistry.models), dict(vllm_registry._parents)
    yield vllm_registry.register_classes()
    ModelRegistry.models.clear()
    ModelRegistry.models.update(models)
    vllm_registry._parents.clear()
    vllm_registry._parents.update(parents)


def classes_of(architecture: str) -> tuple[Any, Any]:
    """The registered class, and vLLM's own."""
    parent = vllm_registry.parent_of(architecture)
    assert parent is not None
    return ModelRegistry.models[architecture].load_model_cls(), parent.load_model_cls()


@pytest.mark.parametrize("architecture", list(FACTS))
def test_a_class_is_its_parent(architecture: str) -> None:
    ours, parent = classes_of(architecture)
    assert ours is not parent
    assert issubclass(ours, parent)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(ours, name) == getattr(parent, name)
    assert repr(ours) == repr(parent)
    assert _ModelInfo.from_model_cls(ours) == _ModelInfo.from_model_cls(parent)
    assert set(dir(ours)) - set(dir(parent)) == {ATTRIBUTE}
    differing = {name for name in dir(parent) if getattr(ours, name) is not getattr(parent, name)}
    of_any_class = {name for name in differing if name.startswith("__")} | {"_abc_impl"}
    assert differing - of_any_class - bound(parent) == {"embed_multimodal"}
    assert ours.embed_multimodal.__doc__ == parent.embed_multimodal.__doc__
    assert ours._processor_factory is parent._processor_factory
    assert ModelRegistry.models[architecture].load_model_cls() is ours


def bound(model_class: Any) -> set[str]:
    """Names whose value is made anew each time that it is read, as class methods are."""
    return {name for name in dir(model_class) if getattr(model_class, name) is not getattr(model_class, name)}


def test_all_are_registered(registered: list[str]) -> None:
    assert registered == list(FACTS) == vllm_registry.register_classes()
    for architecture in FACTS:
        entry = ModelRegistry.models[architecture]
        assert entry.module_name == vllm_registry.CLASSES
        assert re.fullmatch(rf"{architecture}@[0-9a-f]{{12}}", entry.class_name)


def test_what_vllm_keeps_of_a_class_is_of_its_parents_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would go on with what it found out about the class of another version."""
    before = ModelRegistry.models[GEMMA]
    vllm_registry.unregister_classes()
    monkeypatch.setattr(vllm_registry, "_digest", lambda module: "of-another")
    vllm_registry.register_classes()
    after = ModelRegistry.models[GEMMA]
    assert after._get_cache_filename() != before._get_cache_filename()
    assert after.load_model_cls() is before.load_model_cls()


def test_a_digest_is_of_the_source() -> None:
    modules = {vllm_registry.parent_of(architecture).module_name for architecture in FACTS}
    assert len({vllm_registry._digest(module) for module in modules}) == len(modules) > 5


def test_vllms_own_come_back() -> None:
    parent = vllm_registry.parent_of(GEMMA)
    vllm_registry.unregister_classes()
    assert ModelRegistry.models[GEMMA] is parent
    assert vllm_registry.parent_of(GEMMA) is None
    with pytest.raises(AttributeError, match=GEMMA):
        getattr(vllm_classes, f"{GEMMA}@0")


def test_a_class_of_another_plugin_stays() -> None:
    vllm_registry.unregister_classes()
    ModelRegistry.register_model(GEMMA, "another.plugin:Model")
    assert GEMMA not in vllm_registry.register_classes()
    assert ModelRegistry.models[GEMMA].module_name == "another.plugin"
    vllm_registry.unregister_classes()
    assert ModelRegistry.models[GEMMA].module_name == "another.plugin"


def test_one_that_came_after_ours_stays() -> None:
    ModelRegistry.register_model(GEMMA, "another.plugin:Model")
    vllm_registry.unregister_classes()
    assert ModelRegistry.models[GEMMA].module_name == "another.plugin"


def test_a_class_is_asked_itself_then_what_it_derives_from(monkeypatch: pytest.MonkeyPatch) -> None:
    _, parent = classes_of(GEMMA)
    derived: Any = type("Another", (parent,), {"__module__": "another.plugin"})
    speaking: Any = type("Speaking", (parent,), {"__module__": "another.plugin", ATTRIBUTE: Gemma3()})
    wrong: Any = type("Wrong", (), {"__module__": "another.plugin", ATTRIBUTE: "not what it should be"})
    for model_class, images in (
        (derived, FACTS[GEMMA]),
        (speaking, getattr(speaking, ATTRIBUTE)),
        (wrong, None),
        (SimpleNamespace, None),
    ):
        assert vllm_registry.said_by(model_class) is images
    monkeypatch.setattr(utils, "get_model_cls", lambda config: speaking)
    assert vllm_registry.images_of(None) is getattr(speaking, ATTRIBUTE)


def test_a_class_travels_between_processes_by_value() -> None:
    """vLLM sends functions that name classes by cloudpickle; plain pickle would find the parent, and says so."""
    import cloudpickle

    ours, _ = classes_of(GEMMA)
    assert cloudpickle.dumps(ours)
    with pytest.raises(pickle.PicklingError, match="not the same object"):
        pickle.dumps(ours)
