# SPDX-License-Identifier: Apache-2.0
"""The mechanism of hooks on modules made for the test: atomic groups, aliases, undo, disturbance, versions."""

import importlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_mmcache.base.errors import HookDisturbed
from vllm_mmcache.hooking import installer as machine
from vllm_mmcache.hooking.hook import Hook, Hooks, declared_in


def loud(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """A wrapper that shows that it ran."""
    return f"{wrapped(*args, **kwargs)}!"


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    module = types.ModuleType("swap_owner")
    exec(
        "def speak(word):\n    return word\n"
        "class Base:\n    def inherited(self, word):\n        return word\n"
        "class Child(Base):\n"
        "    @staticmethod\n    def static(word):\n        return word\n"
        "    @classmethod\n    def of_class(cls, word):\n        return cls.__name__ + word\n",
        vars(module),
    )
    alias = types.ModuleType("swap_alias")
    alias.speak = module.speak  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "swap_owner", module)
    monkeypatch.setitem(sys.modules, "swap_alias", alias)
    yield module
    machine._installed.pop("g", None)


def entry(target: str, **fields: Any) -> Hook:
    defaults: dict[str, Any] = {
        "name": target,
        "component": "g",
        "target": target,
        "wrapper": loud,
        "process": "api",
        "args_used": ("word",),
        "why": "test",
        "upstream": "none",
        "remove_when": "never",
    }
    return Hook(**{**defaults, **fields})


def test_install_and_undo_function_with_alias(owner: Any) -> None:
    original = owner.speak
    alias: Any = sys.modules["swap_alias"]
    group = [entry("swap_owner:speak", also=("swap_alias:speak",))]
    assert machine.install("g", group, "0.32.0").state == "on"
    assert owner.speak("a") == alias.speak("a") == "a!"
    assert machine.install("g", group, "0.32.0").state == "on"
    assert owner.speak("a") == "a!"  # not wrapped twice
    machine.undo("g")
    assert owner.speak is original
    assert alias.speak is original


def test_methods_keep_their_kind_and_inherited_slots_are_deleted(owner: Any) -> None:
    raw = dict(vars(owner.Child))
    group = [entry(f"swap_owner:Child.{name}") for name in ("static", "of_class", "inherited")]
    assert machine.install("g", group, "0.32.0").state == "on"
    child = owner.Child()
    assert child.static("a") == owner.Child.static("a") == "a!"
    assert child.of_class("a") == owner.Child.of_class("a") == "Childa!"
    assert child.inherited("a") == "a!"
    assert owner.Base().inherited("a") == "a"
    machine.undo("g")
    assert {k: vars(owner.Child)[k] for k in ("static", "of_class")} == {k: raw[k] for k in ("static", "of_class")}
    assert "inherited" not in vars(owner.Child)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (entry("swap_owner:gone"), "renamed or removed"),
        (entry("swap_nowhere:gone"), "can't be imported"),
        (entry("swap_owner:Child.static", args_used=("volume",)), "no argument volume"),
        (entry("swap_owner:Child.static", reads=("swap_owner:gone",)), "renamed or removed"),
        (entry("swap_owner:Child.static", also=("swap_owner:speak",)), "is not the object"),
    ],
)
def test_a_group_is_all_or_nothing(owner: Any, bad: Hook, reason: str) -> None:
    original = owner.speak
    outcome = machine.install("g", [entry("swap_owner:speak"), bad], "0.32.0")
    assert outcome.state == "off"
    assert reason in outcome.reason
    assert owner.speak is original


def test_a_group_that_is_installed_gets_the_hooks_that_it_lacks(owner: Any) -> None:
    """As where a second engine of one process needs more of them than the first."""
    raw = dict(vars(owner.Child))
    first, second, bad = (entry(f"swap_owner:{path}") for path in ("speak", "Child.inherited", "gone"))
    assert machine.install("g", [first], "0.32.0").state == "on"
    assert machine.install("g", [first, second], "0.32.0").state == "on"
    assert (owner.speak("a"), owner.Child().inherited("a")) == ("a!", "a!")
    assert machine.install("g", [first], "0.32.0").state == "on"
    outcome = machine.install("g", [first, second, bad], "0.32.0")
    assert outcome.state == "off"
    assert "renamed or removed" in outcome.reason
    assert (owner.speak("a"), owner.Child().inherited("a")) == ("a!", "a!"), "what the group had stays"
    machine.undo("g")
    assert owner.speak("a") == "a"
    assert dict(vars(owner.Child)) == raw


def test_a_group_that_is_installed_gets_all_that_it_lacks_or_nothing(owner: Any) -> None:
    first, second, bad = (entry(f"swap_owner:{path}") for path in ("Child.static", "speak", "gone"))
    assert machine.install("g", [first], "0.32.0").state == "on"
    assert machine.install("g", [first, second, bad], "0.32.0").state == "off"
    assert (owner.Child.static("a"), owner.speak("a")) == ("a!", "a")


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0"])
def test_on_an_untested_vllm_nothing_is_replaced(owner: Any, version: str) -> None:
    original = owner.speak
    outcome = machine.install("g", [entry("swap_owner:speak")], version)
    assert outcome.state == "off"
    assert f"vLLM {version} is not in the tested range" in outcome.reason
    assert owner.speak is original


def test_failure_midway_takes_back_what_was_set(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = owner.speak

    class Stubborn(types.ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            raise RuntimeError("read-only")

    stubborn = Stubborn("swap_stubborn")
    vars(stubborn)["speak"] = owner.Base.inherited
    monkeypatch.setitem(sys.modules, "swap_stubborn", stubborn)
    with pytest.raises(RuntimeError, match="read-only"):
        machine.install("g", [entry("swap_owner:speak"), entry("swap_stubborn:speak")], "0.32.0")
    assert owner.speak is original


def test_a_group_that_does_not_stay_in_place_is_taken_back_as_a_whole(
    owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another plugin guards a module: what is set there is not there afterwards."""
    original = owner.speak

    class Guarded(types.ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            pass

    guarded = Guarded("swap_guarded")
    vars(guarded)["speak"] = owner.Base.inherited
    monkeypatch.setitem(sys.modules, "swap_guarded", guarded)
    outcome = machine.install("g", [entry("swap_owner:speak"), entry("swap_guarded:speak")], "0.32.0")
    assert outcome.state == "off"
    assert "swap_guarded.speak now holds" in outcome.reason
    assert owner.speak is original


def test_undo_refuses_when_someone_is_on_top(owner: Any) -> None:
    assert machine.install("g", [entry("swap_owner:speak")], "0.32.0").state == "on"
    ours = owner.speak
    owner.speak = lambda word: word
    with pytest.raises(HookDisturbed, match="speak"):
        machine.undo("g")
    owner.speak = ours
    machine.undo("g")


@pytest.mark.parametrize(
    ("version", "supported"),
    [("0.32.0", True), ("0.32.1", True), ("0.33.9", True), ("0.34.0", False), ("0.31.9", False), ("dev", False),
     ("0.33.0.dev1", False), ("0.33.0+cpu", True), ("0.33.0rc1", False)],
)  # fmt: skip
def test_versions(version: str, supported: bool) -> None:
    assert machine.version_supported(version, ">=0.32.0,<0.34") is supported


def test_untested_version_can_be_tried(owner: Any) -> None:
    group = [entry("swap_owner:speak")]
    assert machine.install("g", group, "0.99.0").state == "off"
    assert machine.install("g", group, "0.99.0", allow_untested=True).state == "on"
    machine.undo("g")


TWO_HOOKS = """
from vllm_mmcache.hooking.hook import Hooks

hook = Hooks("g", "api")


@hook("swap_owner:speak", name="one")
def first(wrapped, instance, args, kwargs): ...


@hook("swap_owner:Base.inherited", name="NAME")
def second(wrapped, instance, args, kwargs): ...
"""


def test_a_name_is_declared_once_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "declares_two.py").write_text(TWO_HOOKS.replace("NAME", "two"))
    (tmp_path / "declares_twice.py").write_text(TWO_HOOKS.replace("NAME", "one"))
    assert [hook.name for hook in declared_in("declares_two")] == ["g.one", "g.two"]
    before = declared_in("declares_two")
    importlib.reload(sys.modules["declares_two"])  # the same functions again, as other objects
    again = declared_in("declares_two")
    assert [hook.name for hook in again] == ["g.one", "g.two"]
    assert again[0].wrapper is not before[0].wrapper
    with pytest.raises(ValueError, match=r"g\.one is declared twice in declares_twice"):
        declared_in("declares_twice")


def test_one_function_of_one_name_for_two_symbols_is_declared_twice() -> None:
    hook = Hooks("g", "api")
    with pytest.raises(ValueError, match="declared twice"):
        hook("swap_owner:speak", name="same")(hook("swap_owner:Base.inherited", name="same")(lambda *call: None))
