# SPDX-License-Identifier: Apache-2.0
"""A disk that is full, read-only or not there: one line, and serving goes on. On real mounts, in a namespace."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_mmcache.components.features.disk import DiskTier

from tests.support.packages import BUDGET_BYTES, features, load, save

UNSHARE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]

COMMON = """
import logging, subprocess, sys, time
from types import SimpleNamespace
from tests.support.packages import features, held_bytes, identity, load, save
from vllm_mmcache.storage import breaker
from vllm_mmcache.components.features.disk import DiskTier
from vllm_mmcache.components.features.package import Shape

logging.basicConfig(format="%(message)s")
place = sys.argv[1]
ahead_s = 0
breaker.time = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s)
tier = DiskTier(place, 1 << 30, rest_s=1000)
shape = Shape(256, 64, "bfloat16")

def counts():
    return tier.counters.snapshot()
"""

FULL = """
saved = [number for number in range(100) if save(tier, number, shape)]
kept = [number for number in range(100) if load(tier, number, shape) == features(number, shape)]
assert saved == kept and 10 < len(kept) < 32, kept
assert counts()["errors"] == 1 and counts()["dropped"] == 99 - len(kept), counts()
assert counts()["set_aside"] == 0
assert not (tier.directory.root / "incoming").exists()
tier.directory.clear()
ahead_s += 10_000  # it has rested
assert save(tier, 100, shape)
assert load(tier, 100, shape) == features(100, shape)
"""

FULL_IN_THE_MIDDLE = """
assert save(tier, 0, shape)
too_large = Shape(1536, 512, "bfloat16")
assert not save(tier, 1, too_large)
assert counts()["errors"] == 1
files = [path.name for path in tier.directory.root.rglob("*") if path.is_file()]
assert sorted(files) == sorted([f"{identity(0).key}.safetensors", "lock"]), files
assert int((tier.directory.root / "lock").read_text()) == held_bytes(place)
assert load(tier, 0, shape) == features(0, shape)
assert load(tier, 1, too_large) is None
ahead_s += 10_000  # it has rested
assert save(tier, 2, shape)
assert load(tier, 2, shape) == features(2, shape)
"""

READ_ONLY = """
assert save(tier, 0, shape)
subprocess.run(["mount", "-o", "remount,ro", place], check=True)
for number in range(1, 50):
    assert not save(tier, number, shape)
    assert load(tier, 0, shape) == features(0, shape)
    assert load(tier, number, shape) is None
assert counts()["errors"] == 1 and counts()["dropped"] == 48, counts()
path = tier.directory.path_of(identity(0).key)
subprocess.run(["mount", "-o", "remount,rw", place], check=True)
path.write_bytes(b"")
subprocess.run(["mount", "-o", "remount,ro", place], check=True)
assert load(tier, 0, shape) is None and counts()["set_aside"] == 1
"""


def run_in_tmpfs(code: str, place: Path) -> str:
    """Run `code` on a tmpfs of 1 MiB at `place`; returns what it logged."""
    if shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("this system lets no user mount a tmpfs in a namespace of its own")
    place.mkdir()
    command = 'mount -t tmpfs -o size=1m,mode=700 none "$1"; exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        [*UNSHARE, command, "sh", str(place), sys.executable, COMMON + code],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.process
def test_disk_full(tmp_path: Path) -> None:
    said = run_in_tmpfs(FULL, tmp_path / "small").splitlines()
    assert len(said) == 1
    assert "(writing) is off" in said[0]
    assert "No space left on device" in said[0]


@pytest.mark.process
def test_disk_full_in_the_middle_of_a_package(tmp_path: Path) -> None:
    said = run_in_tmpfs(FULL_IN_THE_MIDDLE, tmp_path / "small")
    assert "No space left on device" in said


@pytest.mark.process
def test_read_only_directory_still_serves(tmp_path: Path) -> None:
    said = run_in_tmpfs(READ_ONLY, tmp_path / "small").splitlines()
    assert "(writing) is off" in said[0]
    assert "Read-only file system" in said[0]
    assert "set aside" in said[1]


def test_a_place_that_can_be_no_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    tier = DiskTier(tmp_path / "file", BUDGET_BYTES)
    for number in range(20):
        assert not save(tier, number)
        assert load(tier, number) is None
    assert tier.counters.snapshot()["errors"] == 2
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]  # reading, writing


def test_works_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vllm.mmcache")
    (tmp_path / "store").write_text("")
    tier = DiskTier(tmp_path / "store", BUDGET_BYTES, rest_s=0)
    assert not save(tier, 0)
    assert not save(tier, 0)
    (tmp_path / "store").unlink()
    assert save(tier, 0)
    assert load(tier, 0) == features(0)
    assert ["is off" in caplog.messages[0], "works again" in caplog.messages[1]] == [True, True]
    assert len(caplog.messages) == 2
