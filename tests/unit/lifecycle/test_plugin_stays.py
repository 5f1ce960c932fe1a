# SPDX-License-Identifier: Apache-2.0
"""The guard that fails a file of tests that takes the plugin out of its process."""

import pytest

from tests.support.plugin_stays import plugin_stays
from vllm_mmcache.hooking import installer
from vllm_mmcache.lifecycle.registry import FIRST


def test_a_file_that_takes_the_plugin_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installer, "_installed", {FIRST.name: []})
    with pytest.raises(AssertionError, match="undone the plugin's first hooks"), plugin_stays():
        installer._installed.clear()


def test_a_file_that_adds_the_plugin_or_needs_none_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installer, "_installed", {})
    with plugin_stays():
        pass
    with plugin_stays():
        installer._installed[FIRST.name] = []
