# SPDX-License-Identifier: Apache-2.0
"""The table of hooks in processes of their own: each order of import, install and undo, and what stops them.

What is imported when is what each ordering is about.
"""

import os
import subprocess
import sys
import textwrap

import pytest

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
from vllm_mmcache.lifecycle.registry import AUDIT, FIRST, KV_EVENTS, REPORT, TRIAL, COMPONENTS, parts, table
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
        members = {one.name: one.hooks_in(role) for one in (REPORT, AUDIT, KV_EVENTS, TRIAL, *parts(role).values())}
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
