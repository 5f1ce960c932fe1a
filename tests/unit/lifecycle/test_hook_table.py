# SPDX-License-Identifier: Apache-2.0
"""The table of hooks on the installed vLLM: complete entries, which fit what they replace."""

import dataclasses
import zipfile
from pathlib import Path

import pytest
from mmcache_tools import check_upstream

from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.hooking import source_digests
from vllm_mmcache.hooking.hook import Hook
from vllm_mmcache.hooking.subclasses import mixin_for
from vllm_mmcache.lifecycle.registry import AUDIT, COMPONENTS, KV_EVENTS, table


def is_opt_in(hook: Hook) -> bool:
    return hook.component in (AUDIT.name, KV_EVENTS.name) or (
        hook.component in COMPONENTS and COMPONENTS[hook.component].opt_in
    )


def test_few_functions_are_replaced_on_v2() -> None:
    """What no subclass overrides, without components that must be asked for, and what V1 or stages alone need."""
    always = [hook for hook in table() if not is_opt_in(hook) and not hook.only]
    replaced = [
        member for member in always if mixin_for(member.target) is None and member.component != "resumed_images"
    ]
    assert len(replaced) <= 35, "is there a subclass or an extension point for it?"


@pytest.mark.slow
@pytest.mark.parametrize("hook", table(), ids=lambda hook: hook.name)
def test_entry_is_complete(hook: Hook) -> None:
    assert all((hook.why, hook.upstream, hook.remove_when, hook.wrapper.__doc__))
    assert source_digests.compare_all_installed((hook.target, *hook.reads), vllm_version()) == "tested"


def test_the_audit_hears_of_every_engine() -> None:
    """A loop that a subclass has instead of EngineCoreProc's would begin without a line about the audit."""
    from vllm.v1.engine.core import EngineCoreProc

    targets = {hook.target for hook in table() if hook.component == AUDIT.name}
    loops = {
        f"{owner.__module__}:{owner.__name__}.run_busy_loop"
        for owner in (EngineCoreProc, *EngineCoreProc.__subclasses__())
        if "run_busy_loop" in vars(owner)
    }
    assert len(loops) > 1
    assert loops <= targets


def test_changed_body_is_noticed() -> None:
    """Negative control of the digests: a docstring does not change them, a statement does."""
    plain = source_digests.digest(source_digests.find("def f(a):\n    return a\n", "f"))
    assert plain == source_digests.digest(source_digests.find('def f(a):\n    """Doc."""\n    return a  # why\n', "f"))
    assert plain != source_digests.digest(source_digests.find("def f(a):\n    return a + 1\n", "f"))


def test_a_changed_body_is_noticed_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a hook replaces, and of what it reads."""
    target, *_ = (hook.target for hook in table())
    known = source_digests.table()[target]
    monkeypatch.setattr(source_digests, "table", lambda: {target: known, "json:dumps": {vllm_version(): "0" * 16}})
    compare = source_digests.compare_all_installed
    assert compare([target], vllm_version()) == "tested"
    assert compare([target, "json:dumps"], vllm_version()) == "changed"
    assert compare([target, "json:loads"], vllm_version()) == "unknown"


def test_a_body_is_found_through_relative_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 has such: a package takes the name from its own module, that one from its parent's, renamed.

    Installed sources and those in a wheel are one walk.
    """
    modules = {
        "walked/__init__.py": "from .parts import taken\n",
        "walked/parts/__init__.py": "from ..origin import made as taken\n",
        "walked/origin.py": "from .deep.inside import made\n",
        "walked/deep/__init__.py": "",
        "walked/deep/inside.py": "def made():\n    return 1\n",
    }
    with zipfile.ZipFile(tmp_path / "wheel.whl", "w") as archive:
        for name, text in modules.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
            archive.writestr(name, text)
        expected = source_digests.digest(source_digests.find(modules["walked/deep/inside.py"], "made"))
        hook = dataclasses.replace(table()[0], target="walked:taken", also=(), reads=(), args_used=())
        assert check_upstream.check_hook(archive, hook) == {"walked:taken": expected}
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(source_digests, "table", lambda: {"walked:taken": {"1.0": expected}})
    assert source_digests.compare_installed("walked:taken", "1.0") == "tested"
    (tmp_path / "walked/deep/inside.py").write_text("def made():\n    return 2\n")
    assert source_digests.compare_installed("walked:taken", "1.0") == "changed"
