# SPDX-License-Identifier: Apache-2.0
"""Whether the compiled CPU operators that are loaded have the signatures with which vLLM's Python code calls them.

    python scripts/cpu_operators.py OLD_VLLM_FOLDER

Runs in an environment whose Python code and compiled extension are of two versions (make_venv_033.py). OLD_VLLM_FOLDER
has the Python code that belongs to the extension. Reads every call of `torch.ops._C.name(...)` out of the installed
sources, and looks at numbers and names of arguments: an argument that changed its meaning alone is not seen, nor an
operator that is taken as a value and called elsewhere. Exit code 1, with a sentence for each, where one does not fit.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Operators whose calls don't fit and that no model of the zoo reaches on the CPU; a call that does raises.
KNOWN = {
    "fused_experts_cpu": "0.33 names the activation, too; of the experts only the quantised ones call it",
    "static_scaled_fp8_quant": "a placeholder without arguments in the CPU build, of either version",
    "dynamic_scaled_fp8_quant": "a placeholder without arguments in the CPU build, of either version",
    "dynamic_per_token_scaled_fp8_quant": "a placeholder without arguments in the CPU build, of either version",
}
OPERATOR = re.compile(r"torch\.ops\._C\.(\w+)(?:\.default)?")


class Call(NamedTuple):
    """One call of an operator. `keywords` has None for `**names`."""

    name: str
    where: str
    positional: int
    keywords: tuple[str | None, ...]
    is_starred: bool


class Argument(NamedTuple):
    """One argument of an operator's schema."""

    name: str
    is_required: bool


def calls(folder: Path) -> Iterator[Call]:
    """All calls of operators of vLLM's own library in the modules below a folder."""
    for path in sorted(folder.rglob("*.py")):
        if "ops._C" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and (found := OPERATOR.fullmatch(ast.unparse(node.func))):
                yield Call(
                    found[1],
                    f"{path.relative_to(folder.parent)}:{node.lineno}",
                    len(node.args),
                    tuple(keyword.arg for keyword in node.keywords),
                    any(isinstance(argument, ast.Starred) for argument in node.args),
                )


def misfit(call: Call, arguments: list[Argument]) -> str:
    """Why a call can't be bound to the arguments of a schema; empty when it can."""
    if call.is_starred or None in call.keywords:
        return "its arguments can't be counted"
    if call.positional > len(arguments):
        return f"it gives {call.positional} arguments, and the operator takes {len(arguments)}"
    names = [argument.name for argument in arguments]
    free = names[call.positional :]
    if unknown := [str(name) for name in call.keywords if name not in free]:
        return f"the operator takes no {', '.join(unknown)} there; it has {', '.join(names)}"
    needed = {argument.name for argument in arguments[call.positional :] if argument.is_required}
    if left := sorted(needed - set(call.keywords)):
        return f"the operator needs {', '.join(left)}"
    return ""


def findings(new: list[Call], old: list[Call], schemas: dict[str, list[Argument]]) -> dict[str, str]:
    """Operator -> the sentence about its first call that does not fit.

    One that is not compiled is another platform's, unless the new code alone calls it and speaks of a CPU.
    """
    known_before = {call.name for call in old}
    found: dict[str, str] = {}
    for call in new:
        if call.name in schemas:
            why = misfit(call, schemas[call.name])
        else:
            is_new = call.name not in known_before and "cpu" in call.name + call.where
            why = "the extension has no such operator" if is_new else ""
        if why:
            found.setdefault(call.name, f"{call.where} calls {call.name}: {why}")
    return found


def loaded_schemas(names: set[str]) -> dict[str, list[Argument]]:
    """The schemas of those operators that vLLM's extension for this machine registers."""
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    packets: dict[str, Any] = {name: getattr(torch.ops._C, name) for name in names if hasattr(torch.ops._C, name)}
    return {
        name: [Argument(one.name, not one.has_default_value()) for one in packet.default._schema.arguments]
        for name, packet in packets.items()
    }


def main() -> int:
    """Run the check; returns the exit code."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    new, old = list(calls(Path(spec.origin).parent)), list(calls(Path(sys.argv[1])))
    schemas = loaded_schemas({call.name for call in new})
    if not schemas:
        print("error: vLLM's CPU extension was not loaded, or registers nothing", file=sys.stderr)
        return 1
    found = findings(new, old, schemas)
    for name, sentence in found.items():
        print(f"operators: {sentence}" + (f" (known: {KNOWN[name]})" if name in KNOWN else ""))
    moved = sorted(set(found) - set(KNOWN))
    print(f"operators: {len(schemas)} compiled ones are called; {len(found)} don't fit, {len(moved)} of them unknown")
    if moved:
        print(f"error: signatures of CPU operators have moved: {', '.join(moved)}", file=sys.stderr)
    return 1 if moved else 0


if __name__ == "__main__":
    sys.exit(main())
