# SPDX-License-Identifier: Apache-2.0
"""Digests of the bodies of what hooks replace or read in vLLM, to notice upstream change that keeps the signature.

17 of 25 symbols near us changed body between vLLM 0.30 and 0.33, 14 of them under an unchanged signature. The digest
ignores docstrings, comments and layout. `source_digests.json` holds the digests of the tested versions; they are
compared by `mmcache doctor` and `make check-upstream`, never at server start.
"""

import ast
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from vllm_mmcache.base.errors import SymbolMissing

TABLE = Path(__file__).with_name("source_digests.json")


class Source(NamedTuple):
    """A module's text, and the package from which its relative imports count."""

    text: str
    package: str


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def find(source: str, path: str) -> Definition | ast.ImportFrom:
    """The definition of `Owner.attr` in a module's source, or the from-import that brings the name.

    Raises: SymbolMissing.
    """
    body: list[ast.stmt] = ast.parse(source).body
    *owners, attribute = path.split(".")
    for owner in owners:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner), [])
    for node in body:
        if isinstance(node, Definition) and node.name == attribute:
            return node
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == attribute for a in node.names):
            return node
    raise SymbolMissing(f"{path} is not defined in that module")


def definition(target: str, source_of: Callable[[str], Source]) -> Definition:
    """The definition of "module:Owner.attr", found through the from-imports that lead to it.

    `source_of` reads a module by its name: from an archive, or as it is installed. Raises: SymbolMissing.
    """
    module, _, path = target.partition(":")
    source = source_of(module)
    while isinstance(node := find(source.text, path), ast.ImportFrom):
        module = importlib.util.resolve_name("." * node.level + (node.module or ""), source.package)
        path = next(name.name for name in node.names if (name.asname or name.name) == path)
        source = source_of(module)
    return node


def digest(node: ast.AST) -> str:
    """First 16 hex characters of the SHA-256 of the normalised source."""
    if isinstance(node, Definition) and ast.get_docstring(node) is not None:
        node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:16]


@cache
def table() -> dict[str, dict[str, str]]:
    """Target -> vLLM version -> digest."""
    loaded: dict[str, dict[str, str]] = json.loads(TABLE.read_text())
    return loaded


def compare_installed(target: str, version: str) -> Literal["tested", "changed", "unknown"]:
    """Compare the installed source of a target with the table; "unknown" where the version is not in it."""
    expected = table().get(target, {}).get(version)
    if expected is None:
        return "unknown"
    try:
        return "tested" if digest(definition(target, _installed)) == expected else "changed"
    except (SymbolMissing, ImportError):
        return "changed"


def compare_all_installed(targets: Iterable[str], version: str) -> Literal["tested", "changed", "unknown"]:
    """The same for several targets: "changed" where one has changed, else "unknown" where one is."""
    found = {compare_installed(target, version) for target in targets}
    return "changed" if "changed" in found else "unknown" if "unknown" in found else "tested"


def _installed(module: str) -> Source:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise SymbolMissing(f"module {module} is not installed")
    return Source(Path(spec.origin).read_text(), spec.parent or "")
