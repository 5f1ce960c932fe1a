# SPDX-License-Identifier: Apache-2.0
"""Digests of the bodies of replaced vLLM functions, to notice upstream change that keeps the signature.

17 of 25 symbols near us changed body between vLLM 0.30 and 0.33, 14 of them under an unchanged signature. The digest
ignores docstrings, comments and layout. `bodies.json` holds the digests of the tested versions; they are compared by
`mmcache doctor` and `make check-upstream`, never at server start.
"""

import ast
import hashlib
import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Literal

from vllm_mmcache.errors import SymbolMissing

TABLE = Path(__file__).with_name("bodies.json")


def find(source: str, path: str) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ImportFrom:
    """The definition of `Owner.attr` in a module's source, or the from-import that brings the name.

    Raises: SymbolMissing.
    """
    body: list[ast.stmt] = ast.parse(source).body
    *owners, attribute = path.split(".")
    for owner in owners:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner), [])
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == attribute:
            return node
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == attribute for a in node.names):
            return node
    raise SymbolMissing(f"{path} is not defined in that module")


def digest(node: ast.AST) -> str:
    """First 16 hex characters of the SHA-256 of the normalised source."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None:
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
        return "tested" if _installed_digest(target) == expected else "changed"
    except (SymbolMissing, ImportError):
        return "changed"


def _installed_digest(target: str) -> str:
    module_name, _, path = target.partition(":")
    spec = importlib.util.find_spec(module_name)
    if spec is None or spec.origin is None:
        raise SymbolMissing(f"module {module_name} is not installed")
    node = find(Path(spec.origin).read_text(), path)
    return _installed_digest(f"{node.module}:{path}") if isinstance(node, ast.ImportFrom) else digest(node)
