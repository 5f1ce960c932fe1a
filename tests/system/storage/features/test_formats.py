# SPDX-License-Identifier: Apache-2.0
"""Two versions of mmcache on one store, each a process of its own."""

import json
from pathlib import Path

import pytest
from vllm_mmcache.components.features.disk import DiskTier

from tests.support.packages import BUDGET_BYTES, features, load, save
from tests.system.cli.test_commands import mmcache
from tests.unit.components.features.test_formats import next_version


def files_of(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.rglob("*.safetensors")}


@pytest.mark.process
@pytest.mark.parametrize("is_first", [True, False], ids=["the earlier one first", "the later one first"])
def test_two_versions_on_one_store(is_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds its own, and neither reads, replaces or sets aside what the other has written of the same image."""
    tier = DiskTier(tmp_path, BUDGET_BYTES)
    for of_this in (is_first, not is_first):
        if of_this:
            assert load(tier, 1) is None
            assert save(tier, 1)
        else:
            with next_version(monkeypatch):
                assert load(tier, 1) is None
                assert save(tier, 1)
    written = files_of(tmp_path)
    assert len(written) == 2
    assert load(tier, 1) == bytes(features(1))
    with next_version(monkeypatch):
        assert load(tier, 1) == bytes(features(1))
    checked = mmcache("store", "check", "--dir", str(tmp_path), "--json")
    assert checked.returncode == 0, checked.stdout
    assert json.loads(checked.stdout)["good"] == 1
    assert files_of(tmp_path) == written
    assert tier.counters.snapshot()["set_aside"] == 0
