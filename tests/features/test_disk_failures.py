# SPDX-License-Identifier: Apache-2.0
"""A disk that is full, read-only or not there: one line, and serving goes on. On real mounts, in a namespace."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.features.packages import BUDGET_BYTES, identity, package, same
from vllm_mmcache.features.disk import DiskTier
from vllm_mmcache.features.package import pack
from vllm_mmcache.features.ram import RamTier
from vllm_mmcache.features.store import Store

UNSHARE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]

COMMON = """
import logging, subprocess, sys, time
from tests.features.packages import identity, package, same
from vllm_mmcache.features.disk import DiskTier
from vllm_mmcache.features.ram import RamTier
from vllm_mmcache.features.store import Store

logging.basicConfig(format="%(message)s")
place = sys.argv[1]
tier = DiskTier(place, 1 << 30, rest_s=0.2)
store = Store(RamTier(0), [tier])

def counts():
    return tier.counters.snapshot()

def save(number):
    store.save(identity(number), package(number, num_tokens=256))
    assert store.flush(10)
"""

FULL = """
for number in range(100):
    save(number)
kept = [number for number in range(100) if store.find(identity(number))[0] is not None]
assert 10 < len(kept) < 32, kept
assert counts()["errors"] == 1 and counts()["dropped"] == 99 - len(kept), counts()
assert counts()["set_aside"] == 0
assert not (tier.directory.root / "incoming").exists()
tier.directory.clear()
time.sleep(0.25)
save(100)
assert same(store.find(identity(100))[0], package(100, num_tokens=256))
"""

READ_ONLY = """
save(0)
subprocess.run(["mount", "-o", "remount,ro", place], check=True)
for number in range(1, 50):
    save(number)
    assert same(store.find(identity(0))[0], package(0, num_tokens=256))
    assert store.find(identity(number))[0] is None
assert counts()["errors"] == 1 and counts()["dropped"] == 48, counts()
path = tier.directory.path_of(identity(0).key)
subprocess.run(["mount", "-o", "remount,rw", place], check=True)
path.write_bytes(b"")
subprocess.run(["mount", "-o", "remount,ro", place], check=True)
assert store.find(identity(0))[0] is None and counts()["set_aside"] == 1
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


def test_disk_full(tmp_path: Path) -> None:
    said = run_in_tmpfs(FULL, tmp_path / "small").splitlines()
    assert len(said) == 1
    assert "(writing) is off" in said[0]
    assert "No space left on device" in said[0]


def test_read_only_directory_still_serves(tmp_path: Path) -> None:
    said = run_in_tmpfs(READ_ONLY, tmp_path / "small").splitlines()
    assert "(writing) is off" in said[0]
    assert "Read-only file system" in said[0]
    assert "set aside" in said[1]


def test_a_place_that_can_be_no_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    store = Store(RamTier(BUDGET_BYTES), [DiskTier(tmp_path / "file", BUDGET_BYTES)])
    for number in range(20):
        store.save(identity(number), package(number))
        assert store.find(identity(100 + number))[0] is None
        assert same(store.find(identity(number))[0], package(number))
    assert store.flush(10)
    assert store.counts()["disk"]["errors"] == 2
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]  # reading, writing


def test_works_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vllm.mmcache")
    (tmp_path / "store").write_text("")
    tier = DiskTier(tmp_path / "store", BUDGET_BYTES, rest_s=0)
    packed = pack(identity(), package())
    tier.save(identity().key, packed)
    tier.save(identity().key, packed)
    (tmp_path / "store").unlink()
    tier.save(identity().key, packed)
    assert same(tier.load(identity()), package())
    assert ["is off" in caplog.messages[0], "works again" in caplog.messages[1]] == [True, True]
    assert len(caplog.messages) == 2


SLOW = """
place = sys.argv[1]
tier, write = DiskTier(place, 1 << 30), DiskTier.save
DiskTier.save = lambda *args: (time.sleep(0.5), write(*args))
Store(RamTier(0), [tier]).save(identity(0), package(0, num_tokens=256))
"""


def test_a_process_that_ends_has_written(tmp_path: Path) -> None:
    """What was handed to the writer before the end, also where nobody closes the store."""
    imports = COMMON.partition("logging.basicConfig")[0]
    subprocess.run([sys.executable, "-c", imports + SLOW, str(tmp_path)], check=True, timeout=120)
    found, _ = Store(RamTier(0), [DiskTier(tmp_path, 1 << 30)]).find(identity(0))
    assert found is not None
    assert same(found, package(0, num_tokens=256))
