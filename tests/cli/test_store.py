# SPDX-License-Identifier: Apache-2.0
"""`mmcache store` as users run it, on a directory that a server may be using."""

import json
from pathlib import Path

import pytest

from tests.cli.test_commands import assert_one_line, mmcache
from tests.features.packages import BUDGET_BYTES, held_bytes, identity, package
from vllm_mmcache.features.disk import DiskTier
from vllm_mmcache.features.package import pack


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    """A store of four packages, one of them with an id that a terminal would obey."""
    filled = DiskTier(tmp_path / "store", BUDGET_BYTES)
    for number in (0, 1, 2, "\x1b[31m"):
        filled.save(identity(number).key, pack(identity(number), package()))
    return filled


def test_ls(tier: DiskTier, tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    shown = mmcache("store", "ls", "--dir", place)
    assert shown.returncode == 0, shown.stderr
    assert "4 packages" in shown.stdout
    assert "features[16, 64]" in shown.stdout
    assert "\x1b" not in shown.stdout
    packages = json.loads(mmcache("store", "ls", "--json", MMCACHE_STORE=place).stdout)["packages"]
    assert {line["content_id"] for line in packages} == {f"image-{number}" for number in (0, 1, 2, "\x1b[31m")}
    assert packages[0].keys() == {"key", "num_bytes", "used", "content_id", "model", "dtype", "layout", "tensors"}


def test_check(tier: DiskTier, tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    good = mmcache("store", "check", "--dir", place)
    assert (good.returncode, good.stdout) == (0, "4 packages are good, 0 files were set aside\n")
    path = tier.directory.path_of(identity(0).key)
    path.write_bytes(path.read_bytes()[:-1])
    tier.directory.path_of(identity(1).key).write_bytes(pack(identity(2), package()))
    found = mmcache("store", "check", "--dir", place, "--json")
    assert found.returncode == 1, found.stderr
    report = json.loads(found.stdout)
    assert report["good"] == 2
    assert {finding["key"] for finding in report["set_aside"]} == {identity(0).key, identity(1).key}
    assert len(list(tier.directory.aside())) == 2
    assert mmcache("store", "check", "--dir", place).returncode == 0


def test_gc_and_clear(tier: DiskTier, tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    (tier.directory.root / "incoming").write_bytes(b"of a killed writer")
    swept = mmcache("store", "gc", "--dir", place, "--json", MMCACHE_STORE_DISK_BYTES="6000")
    assert swept.returncode == 0, swept.stderr
    assert json.loads(swept.stdout)["held_bytes"] == held_bytes(tmp_path) <= 6000
    assert not (tier.directory.root / "incoming").exists()
    cleared = mmcache("store", "clear", "--dir", place)
    assert (cleared.returncode, held_bytes(tmp_path)) == (0, 0)
    assert mmcache("store", "clear", "--dir", place).stdout == "0 files removed\n"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["ls"], "use --dir PATH, or set MMCACHE_STORE"),
        (["clear", "--dir", "/no/such/store"], "there is no store in /no/such/store"),
        (["check", "--dir", "/etc"], "there is no store in /etc"),
        (["gc", "--dir"], "--dir"),
        (["shrink"], "shrink"),
    ],
)
def test_mistakes(args: list[str], said: str) -> None:
    assert_one_line(mmcache("store", *args), said)


def test_a_store_of_others_is_not_touched(tier: DiskTier, tmp_path: Path) -> None:
    tier.directory.root.chmod(0o755)
    assert_one_line(mmcache("store", "clear", "--dir", str(tmp_path / "store")), "expected a directory drwx------")
