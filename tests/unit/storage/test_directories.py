# SPDX-License-Identifier: Apache-2.0
"""A store's directories whose modes somebody widened, as Kubernetes does with fsGroup: what is ours is set right."""

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.packages import features, file_tier, load, save
from tests.support.tiers import record_tier
from vllm_mmcache.base.errors import StoreUnusable
from vllm_mmcache.storage import directories
from vllm_mmcache.storage.directories import is_ours

KEY = b"k" * 32


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "_said", set())


def widen(volume: Path) -> None:
    """What kubelet does to a volume with fsGroup at each mount, unless fsGroupChangePolicy keeps it from doing so."""
    for path in [volume, *volume.rglob("*")]:
        path.chmod(stat.S_IMODE(path.stat().st_mode) | (0o2770 if path.is_dir() else 0o660))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def fill(volume: Path) -> None:
    """One package and one record, of a server that has ended."""
    assert save(file_tier(volume), 0)
    records = record_tier(volume)
    records.put_many({KEY: b"value"})
    records.close()


def test_the_second_start_with_fsgroup(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    fill(tmp_path)
    widen(tmp_path)
    assert mode(tmp_path / "features") == mode(tmp_path / "records") == 0o2770
    for number in range(1, 4):  # whatever is done first, and the same again
        packages, records = file_tier(tmp_path), record_tier(tmp_path)
        assert load(packages, 0) == features(0)
        assert save(packages, number)
        hit = records.get(KEY, bytes)
        assert hit is not None
        assert hit[1] == b"value"
        records.close()
    assert mode(tmp_path / "features") & 0o777 == mode(tmp_path / "records") & 0o777 == 0o700
    assert mode(tmp_path) & 0o777 != 0o700, "the volume itself is not ours"
    assert [record.levelname for record in log.records] == ["WARNING", "WARNING"]
    for name, message in zip(("features", "records"), log.messages, strict=True):
        assert str(tmp_path / name) in message
        assert "drwxrws---" in message


@pytest.mark.parametrize("widened", [0o777, 0o755, 0o701, 0o770])
def test_every_mode_is_set_right(widened: int, tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "features").chmod(widened)
    assert save(file_tier(tmp_path), 1)
    assert mode(tmp_path / "features") == 0o700


def to_a_link(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.with_name("elsewhere").chmod(0o770)
    folder.symlink_to(folder.with_name("elsewhere"))


def to_another_user(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory to another user")
    folder.chmod(0o770)
    os.chown(folder, 12345, -1)


@pytest.mark.parametrize("spoil", [to_a_link, to_another_user])
def test_what_is_not_ours_is_left_as_it_is(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    """Negative control: it is refused, and nobody's modes are changed."""
    fill(tmp_path)
    folder = tmp_path / "features"
    spoil(folder)
    with pytest.raises(StoreUnusable, match="expected a directory drwx------ of user"):
        is_ours(folder)
    assert not save(file_tier(tmp_path), 1)
    assert load(file_tier(tmp_path), 0) is None
    assert mode(folder) == 0o770


@pytest.mark.parametrize("is_link", [True, False], ids=["a link", "another user's directory"])
def test_what_is_put_there_meanwhile_is_left_as_it_is(
    is_link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the directory and its opening."""
    if not is_link and os.geteuid() != 0:
        pytest.skip("only root can give a directory to another user")
    fill(tmp_path)
    widen(tmp_path)
    folder, other = tmp_path / "features", tmp_path / "other"
    other.mkdir()
    other.chmod(0o770)
    open_ = os.open

    def swap_and_open(path: Path, flags: int) -> int:
        folder.rename(tmp_path / "elsewhere")
        if is_link:
            folder.symlink_to(other)
        else:
            os.chown(other, 12345, -1)
            other.rename(folder)
        return open_(path, flags)

    monkeypatch.setattr(os, "open", swap_and_open)
    with pytest.raises(StoreUnusable, match="can't be made so" if is_link else "owner 12345"):
        is_ours(folder)
    assert mode(folder) == 0o770


def test_a_volume_where_chmod_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems take it and keep the mode that they were mounted with."""
    fill(tmp_path)
    widen(tmp_path)
    monkeypatch.setattr(os, "fchmod", lambda *_: None)
    with pytest.raises(StoreUnusable, match="expected a directory drwx------"):
        is_ours(tmp_path / "features")


def test_level(log: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """A second change of the same directory is no second warning."""
    log.set_level(logging.INFO)
    fill(tmp_path)
    for _ in range(3):
        widen(tmp_path)
        assert is_ours(tmp_path / "features")
    assert len(log.records) == 1
