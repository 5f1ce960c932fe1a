# SPDX-License-Identifier: Apache-2.0
"""The table of hooks on the installed vLLM: complete entries, and each order of import, install and undo.

Each ordering runs in a process of its own, since what is imported when is what it is about.
"""

import dataclasses
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from mmcache_tools import check_upstream

from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.hooking import source_digests
from vllm_mmcache.hooking.hook import Hook
from vllm_mmcache.hooking.subclasses import mixin_for
from vllm_mmcache.lifecycle.registry import COMPONENTS, table

ORDERINGS = {
    "import, install, undo": "IMPORT; before = raw(); INSTALL; assert ours(); UNDO; assert same(before)",
    "install, undo": "INSTALL; assert ours(); UNDO; assert not ours()",
    "install, import, undo": "INSTALL; IMPORT; assert ours(); UNDO; assert not ours()",
    "install twice": "IMPORT; before = raw(); INSTALL; INSTALL; assert ours(); UNDO; assert same(before)",
    "install, undo, install, undo": (
        "IMPORT; before = raw(); INSTALL; UNDO; INSTALL; assert ours(); UNDO; assert same(before)"
    ),
    "undo without install": "IMPORT; before = raw(); UNDO; assert same(before)",
    "register twice, undo all": (
        "IMPORT; before = raw(); REGISTER; REGISTER; assert only_first(); UNDO; assert same(before)"
    ),
    "all roles twice, undo all": "IMPORT; before = raw(); ROLES; ROLES; assert ours(); UNDO; assert same(before)",
}

PRELUDE = """
import importlib, inspect
from vllm_mmcache.base.versions import vllm_version
from vllm_mmcache.hooking import installer
from vllm_mmcache.lifecycle.registry import FIRST, REPORT, COMPONENTS, parts, table
targets = [t for m in table() for t in (m.target, *m.also)]

def raw():
    out = []
    for target in targets:
        owner, name = installer.resolve_owner(target)
        out.append(vars(owner).get(name, None))
    return out

def same(before):
    return all(a is b for a, b in zip(before, raw(), strict=True))

def ours():
    return all(installer.is_replaced(t) for t in targets)

def only_first():
    return {m.component for m in table() if installer.is_replaced(m.target)} == {FIRST.name}

def roles():
    from vllm_mmcache.lifecycle import activation
    activation.start()
    for role in ("api", "engine", "worker"):
        members = {one.name: one.hooks_in(role) for one in (REPORT, *parts(role).values())}
        for component, part in members.items():
            assert activation._install(f"{component} ({role})", part, vllm_version()).state == "on", component

def install():
    for group in dict.fromkeys(hook.component for hook in table()):
        outcome = installer.install(group, [hook for hook in table() if hook.component == group], vllm_version())
        assert outcome.state == "on", outcome
"""


def in_process(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter without the plugin being loaded by vLLM; returns stdout."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("MMCACHE_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.process
def test_orderings() -> None:
    """Each ordering in a forked child of one interpreter, two at a time.

    It has only torch imported when the first are forked; those that begin with the imports come after its own.
    """
    steps = {
        "IMPORT": "[importlib.import_module(t.partition(':')[0]) for t in targets]",
        "INSTALL": "install()",
        "UNDO": "installer.undo_all()",
        "ROLES": "roles()",
        "REGISTER": "__import__('vllm_mmcache.plugin').plugin.register()",
    }
    code = "import os, sys, torch\nchildren = {}\n"
    end = "pid, status = os.wait()\nassert status == 0, children.pop(pid)\n"
    orderings = sorted(ORDERINGS.items(), key=lambda item: item[1].startswith("IMPORT"))
    has_imported = False
    for number, (name, ordering) in enumerate(orderings):
        if ordering.startswith("IMPORT") and not has_imported:
            code += f"{PRELUDE}\n{steps['IMPORT']}\n"
            has_imported = True
        body = PRELUDE
        for step in ordering.split("; "):
            body += steps.get(step, step) + "\n"
        code += (
            "sys.stdout.flush()\nchild = os.fork()\nif child == 0:\n    try:\n"
            + textwrap.indent(body, " " * 8)
            + f"\n        print('passed:', {name!r}, flush=True)\n    except BaseException:\n"
            + "        import traceback; traceback.print_exc()\n        os._exit(1)\n    os._exit(0)\n"
            + f"children[child] = {name!r}\n"
            + (end if number else "")
        )
    out = in_process(code + end)
    assert out.count("passed:") == len(ORDERINGS)


def is_opt_in(hook: Hook) -> bool:
    return hook.component in COMPONENTS and COMPONENTS[hook.component].opt_in


def test_few_functions_are_replaced_on_v2() -> None:
    """What no subclass overrides, without components that must be asked for, and what V1 or stages alone need."""
    always = [hook for hook in table() if not is_opt_in(hook) and not hook.only]
    replaced = [
        member for member in always if mixin_for(member.target) is None and member.component != "resumed_images"
    ]
    assert len(replaced) <= 32, "is there a subclass or an extension point for it?"


@pytest.mark.process
def test_disable_leaves_stock_vllm() -> None:
    """MMCACHE_DISABLE=1: register imports and replaces nothing."""
    out = in_process(
        "import sys\nfrom vllm_mmcache.plugin import register\nregister()\n"
        "assert not [m for m in sys.modules if m.startswith(('vllm.', 'vllm_mmcache.lifecycle', 'wrapt'))]\n"
        "from vllm_mmcache.hooking import installer\nfrom vllm_mmcache.lifecycle.registry import table\n"
        "assert not any(installer.is_replaced(t) for m in table() for t in (m.target, *m.also))\nprint('stock')",
        MMCACHE_DISABLE="1",
    )
    assert "stock" in out


@pytest.mark.process
def test_entry_module_imports_only_the_standard_library() -> None:
    """A broken dependency must not make vLLM log an ImportError and run silently without us."""
    out = in_process(
        "import sys\nbefore = set(sys.modules)\nimport vllm_mmcache.plugin\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names) - {'vllm_mmcache'}))"
    )
    assert out.strip() == "[]"


@pytest.mark.process
def test_wrong_variable_stops_register() -> None:
    code = (
        "from vllm_mmcache.base.errors import SettingsError\nfrom vllm_mmcache.plugin import register\n"
        "try:\n    register()\nexcept SettingsError as error:\n    print(error)\n"
    )
    out = in_process(code, MMCACHE_BLOCK_KEYS="maybe")
    assert "MMCACHE_BLOCK_KEYS = 'maybe' is not allowed" in out
    assert in_process(code, MMCACHE_BLOCK_KEY="0") == "", "what is no setting stops nothing"


@pytest.mark.slow
@pytest.mark.parametrize("hook", table(), ids=lambda hook: hook.name)
def test_entry_is_complete(hook: Hook) -> None:
    assert all((hook.why, hook.upstream, hook.remove_when, hook.vllm, hook.wrapper.__doc__))
    assert "<" in hook.vllm, "both ends of the version range"
    assert ">=" in hook.vllm, "both ends of the version range"
    assert source_digests.compare_installed(hook.target, vllm_version()) == "tested"


def test_changed_body_is_noticed() -> None:
    """Negative control of the digests: a docstring does not change them, a statement does."""
    plain = source_digests.digest(source_digests.find("def f(a):\n    return a\n", "f"))
    assert plain == source_digests.digest(source_digests.find('def f(a):\n    """Doc."""\n    return a  # why\n', "f"))
    assert plain != source_digests.digest(source_digests.find("def f(a):\n    return a + 1\n", "f"))


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
        assert check_upstream.check_hook(archive, hook) == expected
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(source_digests, "table", lambda: {"walked:taken": {"1.0": expected}})
    assert source_digests.compare_installed("walked:taken", "1.0") == "tested"
    (tmp_path / "walked/deep/inside.py").write_text("def made():\n    return 2\n")
    assert source_digests.compare_installed("walked:taken", "1.0") == "changed"
