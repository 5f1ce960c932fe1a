# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a Python example: it does not compile, or imports or passes what is not there.

Modules are imported, so vLLM too where an example does that; `uses_vllm` says so beforehand.
"""

import ast
import builtins
import importlib
import inspect
import symtable
from collections.abc import Collection, Iterator
from typing import Any

OURS = ("vllm_mmcache", "mmcache_tools")
RESOLVED = (*OURS, "vllm", "openai")
HEAVY = frozenset({"ray", "torch", "transformers", "vllm"})  # an example that imports one is not run


def parsed(source: str) -> ast.Module | str:
    """The tree of an example, or why there is none."""
    try:
        tree = ast.parse(source)
        compile(source, "example", "exec")
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    return tree


def imported_roots(source: str) -> set[str]:
    tree = parsed(source)
    if isinstance(tree, str):
        return set()
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def uses_vllm(source: str) -> bool:
    return "vllm" in imported_roots(source)


def problems(source: str) -> Iterator[str]:
    tree = parsed(source)
    if isinstance(tree, str):
        yield tree
        return
    objects: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (f"line {node.lineno}: {what}" for what in resolve(node, objects))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from (f"line {node.lineno}: {what}" for what in call_problems(node, objects))


def resolve(node: ast.Import | ast.ImportFrom, objects: dict[str, Any]) -> Iterator[str]:
    """Import what a statement imports, and note it by its name in the example; yields what is not there."""
    module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
    for alias in node.names:
        name = module or alias.name
        if name.partition(".")[0] not in RESOLVED:
            continue
        try:
            found = importlib.import_module(name)
        except ImportError:
            yield f"{name}: no such module"
            continue
        if not module:
            root = importlib.import_module(name.partition(".")[0])
            objects[alias.asname or root.__name__] = found if alias.asname else root
        elif hasattr(found, alias.name):
            objects[alias.asname or alias.name] = getattr(found, alias.name)
        else:
            try:
                objects[alias.asname or alias.name] = importlib.import_module(f"{name}.{alias.name}")
            except ImportError:
                yield f"{name} has no {alias.name}"


def call_problems(call: ast.Call, objects: dict[str, Any]) -> Iterator[str]:
    """Arguments that a callable of ours, or vLLM's LLM and SamplingParams, do not take."""
    called, path = call.func, list[str]()
    while isinstance(called, ast.Attribute):
        path.insert(0, called.attr)
        called = called.value
    if not (isinstance(called, ast.Name) and called.id in objects):
        return
    found = objects[called.id]
    for name in path:
        if not hasattr(found, name):
            if inspect.ismodule(found):
                yield f"{found.__name__} has no {name}"
            return
        found = getattr(found, name)
    keywords = [keyword.arg for keyword in call.keywords]
    known = engine_keywords(found)
    if known is not None:
        yield from (f"{found.__name__} takes no {name}" for name in keywords if name is not None and name not in known)
    elif str(getattr(found, "__module__", "")).partition(".")[0] in OURS and callable(found):
        if None in keywords or any(isinstance(argument, ast.Starred) for argument in call.args):
            return
        try:
            inspect.signature(found).bind(*call.args, **{str(name): None for name in keywords})
        except TypeError as error:
            yield f"{found.__name__}: {error}"


def engine_keywords(called: Any) -> Collection[str] | None:
    """The arguments of vLLM's LLM, AsyncEngineArgs, EngineArgs and SamplingParams; None for all else."""
    if str(getattr(called, "__module__", "")).partition(".")[0] != "vllm":
        return None
    from vllm.engine.arg_utils import EngineArgs

    names = list(inspect.signature(called).parameters) if inspect.isclass(called) else []
    if called.__name__ == "LLM":
        return {*names, *EngineArgs.__dataclass_fields__} - {"kwargs"}
    return names if called.__name__ in ("AsyncEngineArgs", "EngineArgs", "SamplingParams") else None


def free_names(source: str) -> set[str]:
    """The names that an example uses and does not make, builtins left out."""
    top = symtable.symtable(source, "example", "exec")
    made = {one.get_name() for one in top.get_symbols() if one.is_assigned() or one.is_imported()}
    used: set[str] = set()
    tables = [top]
    for table in tables:
        tables += table.get_children()
        for one in table.get_symbols():
            if one.is_referenced() and (table is top or one.is_global()):
                used.add(one.get_name())
    return used - made - set(dir(builtins)) - {"__name__", "__file__"}


def leaves_out(source: str) -> bool:
    """Whether an argument is `...`, so that the example is not whole."""
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(isinstance(arg, ast.Constant) and arg.value is ... for call in calls for arg in call.args)


def can_be_run(source: str, namespace: Collection[str] = ()) -> bool:
    """Whether an example is self-contained, given what those before it on the page have made, and starts no engine."""
    if isinstance(parsed(source), str) or imported_roots(source) & HEAVY or leaves_out(source):
        return False
    return free_names(source) <= set(namespace)
