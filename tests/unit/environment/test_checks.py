# SPDX-License-Identifier: Apache-2.0
"""The checks of packages, which run in threads beside one that imports torch."""

import importlib.machinery
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest

from vllm_mmcache.environment import checks

PACKAGE = "torchvision"


class Finder:
    """Notes which modules it is asked for, and finds none."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        self.asked.append(name)
        return None


def test_no_finder_of_this_process_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook's finder imports torch when it is asked for torchvision."""
    finder = Finder()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    monkeypatch.setattr(subprocess, "run", lambda command, **more: subprocess.CompletedProcess(command, 0))
    assert checks.import_error(PACKAGE) is None
    assert PACKAGE not in finder.asked
    importlib.util.find_spec(PACKAGE)
    assert PACKAGE in finder.asked, "what is not asked here is asked by others"


def test_what_is_not_installed_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    assert checks.import_error("a_package_that_nobody_has") is None
