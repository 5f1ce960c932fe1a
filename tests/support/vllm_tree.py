# SPDX-License-Identifier: Apache-2.0
"""Copies of vLLM that can be patched, and programs that run on them."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

REPO = Path(__file__).parents[2]
APPLY = REPO / "patches" / "apply"
LINKED_BYTES = 1 << 20  # larger files are compiled libraries, which no patch touches


def installed() -> Path:
    """The folder of the installed vLLM, which is not imported."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def copy_installed(tree: Path) -> Path:
    """A tree with a copy of the installed vLLM; compiled libraries are links."""
    shutil.copytree(installed(), tree / "vllm", copy_function=_copy_or_link)
    return tree


def _copy_or_link(source: str, target: str) -> None:
    if os.path.getsize(source) > LINKED_BYTES:
        os.symlink(os.path.realpath(source), target)
    else:
        shutil.copy2(source, target)


def unpack_sources(wheel: Path, tree: Path) -> Path:
    """A tree with the Python files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tree, [name for name in archive.namelist() if name.endswith(".py")])
    return tree


def apply(*arguments: object) -> "subprocess.CompletedProcess[str]":
    """patches/apply with these arguments."""
    return subprocess.run(
        [sys.executable, str(APPLY), *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300
    )


def run_on(tree: Path, *command: str, timeout_s: float = 600, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run this Python with `command`; vLLM comes from the tree."""
    environ = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{REPO}"} | variables
    return subprocess.run(
        [sys.executable, *command],
        cwd=REPO,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
