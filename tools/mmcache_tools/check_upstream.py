# SPDX-License-Identifier: Apache-2.0
"""`make check-upstream`: resolve every hook against the vLLM 0.32.0 and 0.33.0 wheels without importing them.

    python -m mmcache_tools.check_upstream [--wheels DIR] [--record]

Downloads the wheels with pip where they are not in DIR yet, reads the sources out of them, and checks each symbol,
its aliases, its arguments and its body digest. --record writes source_digests.json anew. Exit code 1 on any finding.
"""

import argparse
import ast
import json
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

from vllm_mmcache.base.errors import HookError, SymbolChanged, SymbolMissing
from vllm_mmcache.hooking import source_digests
from vllm_mmcache.hooking.hook import Hook
from vllm_mmcache.lifecycle import registry

VERSIONS = ("0.32.0", "0.33.0")


def wheel(version: str, folder: Path) -> Path:
    """The vLLM wheel of a version in `folder`, fetched by pip if it is not there. Raises: CalledProcessError."""
    folder.mkdir(parents=True, exist_ok=True)
    found = sorted(folder.glob(f"vllm-{version}-*.whl"))
    if found:
        return found[0]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (28, 31, 35)]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", *platforms]
    subprocess.run([*command, "-d", str(folder), f"vllm=={version}"], check=True)
    return next(iter(sorted(folder.glob(f"vllm-{version}-*.whl"))))


def source_of(archive: zipfile.ZipFile, module: str) -> source_digests.Source:
    """A module's source in the wheel. Raises: SymbolMissing."""
    path = module.replace(".", "/")
    for member, package in ((f"{path}.py", module.rpartition(".")[0]), (f"{path}/__init__.py", module)):
        if member in archive.namelist():
            return source_digests.Source(archive.read(member).decode(), package)
    raise SymbolMissing(f"the wheel has no {path}.py")


def check_hook(archive: zipfile.ZipFile, hook: Hook) -> dict[str, str]:
    """Check one entry; returns the digests of its target's body, and of those it reads. Raises: HookError."""
    read = partial(source_of, archive)
    node = source_digests.definition(hook.target, read)
    if isinstance(node, ast.ClassDef):
        raise SymbolChanged(f"{hook.target} is a class, not a function")
    arguments = node.args
    names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    missing = [name for name in hook.args_used if name not in names]
    if missing:
        raise SymbolChanged(f"{hook.target} has no argument {', '.join(missing)}; it has {sorted(names)}")
    for target in (*hook.also, *hook.reads):
        module, _, path = target.partition(":")
        source_digests.find(read(module).text, path)
    bodies = {hook.target: node} | {target: source_digests.definition(target, read) for target in hook.reads}
    return {target: source_digests.digest(body) for target, body in bodies.items()}


def main() -> int:
    """Run the check; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m mmcache_tools.check_upstream", description=__doc__)
    parser.add_argument("--wheels", type=Path, default=Path(".artifacts/wheels"))
    parser.add_argument("--record", action="store_true", help="write source_digests.json anew")
    options = parser.parse_args()
    findings = 0
    table: dict[str, dict[str, str]] = {}
    for version in VERSIONS:
        with zipfile.ZipFile(wheel(version, options.wheels)) as archive:
            for hook in registry.table():
                try:
                    seen = check_hook(archive, hook)
                except HookError as error:
                    print(f"{version} {hook.name}: {error}")
                    findings += 1
                    continue
                for target, body in seen.items():
                    table.setdefault(target, {})[version] = body
                    if not options.record and source_digests.table().get(target, {}).get(version) != body:
                        print(f"{version} {hook.name}: {target} has changed; read it, then run with --record")
                        findings += 1
                    else:
                        print(f"{version} {hook.name}: {target} is ok ({body})")
    if options.record and not findings:
        source_digests.TABLE.write_text(json.dumps(table, indent=2) + "\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
