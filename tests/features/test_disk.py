# SPDX-License-Identifier: Apache-2.0
"""The disk tier in one process: budget, order of eviction, and files that are no whole package."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.features.packages import BUDGET_BYTES, held_bytes, identity, package, same
from tests.features.test_package import HOSTILE
from vllm_mmcache.features.disk import DiskTier
from vllm_mmcache.features.package import pack

PACKED_BYTES = len(pack(identity(0), package(0)))


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "store", BUDGET_BYTES)


def save(tier: DiskTier, number: int) -> Path:
    tier.save(identity(number).key, pack(identity(number), package(number)))
    return tier.directory.path_of(identity(number).key)


def test_a_package_outlives_the_process(tier: DiskTier, tmp_path: Path) -> None:
    assert tier.load(identity()) is None  # no directory yet
    assert not tier.has(identity())
    save(tier, 0)
    again = DiskTier(tmp_path / "store", BUDGET_BYTES)
    assert again.has(identity())
    assert same(again.load(identity()), package(0))
    assert again.load(identity(1)) is None
    counts = again.counters.snapshot()
    assert (counts["hits"], counts["misses"], counts["errors"]) == (1, 1, 0)


def test_nobody_else_may_look(tier: DiskTier, tmp_path: Path) -> None:
    path = save(tier, 0)
    assert path.stat().st_mode & 0o777 == 0o600
    folders = [tmp_path / "store", tier.directory.root, path.parent]
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


@pytest.mark.parametrize("spoil", ["mode", "link"])
def test_a_directory_that_others_could_write_is_not_trusted(
    tier: DiskTier, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tier, 0)
    root = tier.directory.root
    if spoil == "mode":
        root.chmod(0o777)
    else:
        root.rename(root.parent / "elsewhere")
        root.symlink_to(root.parent / "elsewhere")
    assert tier.load(identity(0)) is None
    assert tier.load(identity(0)) is None
    save(tier, 1)
    assert tier.counters.snapshot()["errors"] == 2  # one read, one write, then left alone
    assert all("expected a directory drwx------" in record.message for record in caplog.records)
    assert len(caplog.records) == 2


def test_never_above_the_budget(tmp_path: Path) -> None:
    """1,000 packages against 50 MiB."""
    budget = 50 * 1024**2
    tier = DiskTier(tmp_path, budget)
    peak = 0
    for number in range(1000):
        tier.save(identity(number).key, pack(identity(number), package(number % 3, num_tokens=512, hidden=128)))
        if number % 10 == 0:
            peak = max(peak, held_bytes(tmp_path))
    counts = tier.counters.snapshot()
    assert 0.8 * budget < peak <= budget
    assert counts["held_bytes"] == held_bytes(tmp_path) <= budget
    assert counts["saved"] == 1000
    assert counts["evictions"] + len(list(tier.directory.packages())) == 1000
    assert tier.has(identity(999))
    assert not tier.has(identity(0))


def test_the_one_used_longest_ago_goes_first(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 10 * PACKED_BYTES)
    for number in range(10):
        os.utime(save(tier, number), (1000 + number, 1000 + number))
    assert tier.load(identity(0)) is not None  # now used last
    save(tier, 10)
    kept = [tier.has(identity(number)) for number in range(11)]
    assert kept[0]
    assert kept[10]
    assert kept[1:10] == sorted(kept[1:10])  # the older ones are gone, the newer ones are there
    assert not kept[1]


def test_a_smaller_budget_holds_after_the_next_write(tmp_path: Path) -> None:
    for number in range(10):
        save(DiskTier(tmp_path, 20 * PACKED_BYTES), number)
    save(DiskTier(tmp_path, 5 * PACKED_BYTES), 10)
    assert held_bytes(tmp_path) <= 5 * PACKED_BYTES


def test_larger_than_the_budget_is_not_kept(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, PACKED_BYTES - 1)
    save(tier, 0)
    assert not tier.has(identity(0))
    assert tier.counters.snapshot()["dropped"] == 1


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    packed = bytearray(path.read_bytes())
    packed[-5] ^= 1
    path.write_bytes(packed)


def older(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"vllm-mmcache features 1", b"vllm-mmcache features 0"))


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


SPOILS: list[Callable[[Path], object]] = [
    truncate,
    flip,
    older,
    link,
    folder,
    pipe,
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(b"\x89PNG foreign" * 100),
    lambda path: path.write_bytes(pack(identity("other"), package(0))),
    lambda path: os.truncate(path, BUDGET_BYTES + 1),
]
NAMES = ["truncated", "bit flipped", "older version", "link", "folder", "pipe", "empty", "foreign", "renamed", "huge"]


@pytest.mark.parametrize("spoil", SPOILS, ids=NAMES)
def test_a_file_that_is_no_whole_package_is_a_miss_and_set_aside(
    tier: DiskTier, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tier, 0)
    spoil(path)
    assert tier.load(identity(0)) is None
    assert not os.path.lexists(path)
    assert os.path.lexists(tier.directory.root / "aside" / path.name)
    assert tier.load(identity(0)) is None  # a plain miss now
    counts = tier.counters.snapshot()
    assert (counts["hits"], counts["misses"], counts["set_aside"], counts["errors"]) == (0, 2, 1, 0)
    assert "set aside" in caplog.text
    save(tier, 0)  # the tower ran again
    assert same(tier.load(identity(0)), package(0))


def test_what_is_set_aside_is_bounded_and_counts(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 100 * PACKED_BYTES)
    for number in range(60):
        flip(save(tier, number))
        assert tier.load(identity(number)) is None
    assert len(list(tier.directory.aside())) == 16
    for number in range(100, 250):
        save(tier, number)
    assert held_bytes(tmp_path) <= 100 * PACKED_BYTES
    assert not list(tier.directory.aside())  # the first to go


def test_a_store_removed_under_way_is_made_again(tier: DiskTier) -> None:
    save(tier, 0)
    shutil.rmtree(tier.directory.root.parent)
    assert tier.load(identity(0)) is None
    save(tier, 0)
    assert same(tier.load(identity(0)), package(0))
    assert tier.counters.snapshot()["errors"] == 0


@pytest.mark.parametrize("account", [b"", b"garbage", b"-1\n", b"0" * 20 + b"\n", b"9" * 20 + b"\n"])
def test_a_wrong_account_is_corrected(tmp_path: Path, account: bytes) -> None:
    for number in range(10):
        save(DiskTier(tmp_path, 100 * PACKED_BYTES), number)
    (tmp_path / "features" / "lock").write_bytes(account)
    tier = DiskTier(tmp_path, 5 * PACKED_BYTES)
    save(tier, 10)
    assert tier.counters.snapshot()["held_bytes"] == held_bytes(tmp_path) <= 5 * PACKED_BYTES


def test_files_that_are_not_ours_are_left_alone(tier: DiskTier) -> None:
    path = save(tier, 0)
    strangers = [tier.directory.root / "notes.txt", path.parent / "notes.txt", path.parent / f"{path.name}.bak"]
    for stranger in strangers:
        stranger.write_text("mine")
    assert tier.directory.clear() == 1
    assert [stranger.read_text() for stranger in strangers] == ["mine"] * 3


@pytest.mark.parametrize("content_id", HOSTILE)
def test_a_hostile_content_id_reaches_no_path(tier: DiskTier, tmp_path: Path, content_id: str) -> None:
    asked = replace(identity(), content_id=content_id)
    tier.save(asked.key, pack(asked, package()))
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]
    assert [path.name for path in files] == [f"{asked.key}.safetensors"]
