# SPDX-License-Identifier: Apache-2.0
"""The disk tier under several processes: killed while they write, at work at the same time, and forked."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.features.packages import held_bytes, identity, package, same
from vllm_mmcache.features.disk import DiskTier
from vllm_mmcache.features.package import pack, unpack

NUM_PACKAGES = 40
SIZE_BYTES = len(pack(identity(), package(num_tokens=1024, hidden=128)))  # 256 KiB
BUDGET_BYTES = 10 * SIZE_BYTES


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for number in range(NUM_PACKAGES):
        asked = identity(number)
        (folder / asked.key).write_bytes(pack(asked, package(number, num_tokens=1024, hidden=128)))
    return folder


def start(place: Path, source: Path, seed: int, *rounds: str) -> "subprocess.Popen[str]":
    arguments = [str(place), str(source), str(BUDGET_BYTES), str(seed), *rounds]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.features.writer_process", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


def assert_only_good_packages(tier: DiskTier) -> None:
    for entry in tier.directory.packages():
        stored, _ = unpack(entry.path.read_bytes())
        assert stored.key == entry.key


def test_killed_fifty_times_while_writing(tmp_path: Path, source: Path) -> None:
    unfinished = 0
    for round_ in range(50):
        process = start(tmp_path, source, round_)
        time.sleep(0.0013 * round_)
        assert process.poll() is None, process.communicate()
        process.kill()
        process.communicate()
        tier = DiskTier(tmp_path, BUDGET_BYTES)
        if tier.directory.is_there():
            unfinished += (tier.directory.root / "incoming").exists()
            assert_only_good_packages(tier)
        assert held_bytes(tmp_path) <= BUDGET_BYTES + SIZE_BYTES
    assert unfinished > 3  # else nothing was killed where it matters
    tier.save(identity(-1).key, pack(identity(-1), package()))
    assert not (tier.directory.root / "incoming").exists()
    assert same(tier.load(identity(-1)), package())
    assert tier.counters.snapshot()["held_bytes"] == held_bytes(tmp_path) <= BUDGET_BYTES


def test_processes_keep_one_budget(tmp_path: Path, source: Path) -> None:
    processes = [start(tmp_path, source, seed, "150") for seed in range(3)]
    tier = DiskTier(tmp_path, BUDGET_BYTES)
    peak = 0
    while any(process.poll() is None for process in processes):
        peak = max(peak, held_bytes(tmp_path))
        for number in range(0, NUM_PACKAGES, 5):
            found = tier.load(identity(number))
            assert found is None or same(found, package(number, num_tokens=1024, hidden=128))
    assert [process.communicate()[1] for process in processes] == [""] * 3
    assert [process.returncode for process in processes] == [0] * 3
    assert 0.8 * BUDGET_BYTES < peak <= BUDGET_BYTES + SIZE_BYTES
    assert_only_good_packages(tier)
    counts = tier.counters.snapshot()
    assert counts["hits"] > 0
    assert (counts["set_aside"], counts["errors"]) == (0, 0)


FORK = """
import os, sys
from tests.features.packages import identity, package, same
from vllm_mmcache.features.disk import DiskTier
from vllm_mmcache.features.ram import RamTier
from vllm_mmcache.features.store import Store

store = Store(RamTier(0), [DiskTier(sys.argv[1], 1 << 26)])
store.save(identity(0), package(0))
assert store.flush(10)
child = os.fork()
number = 1 if child else 2
for again in range(20):
    store.save(identity(number), package(number))
assert store.flush(10)
assert same(store.find(identity(0))[0], package(0))
assert same(store.find(identity(number))[0], package(number))
assert store.close()
if child:
    assert os.waitpid(child, 0)[1] == 0
    assert same(store.find(identity(2))[0], package(2))
"""


def test_a_forked_child_goes_on(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORK, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
