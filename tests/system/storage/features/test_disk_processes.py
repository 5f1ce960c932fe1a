# SPDX-License-Identifier: Apache-2.0
"""The disk tier under several processes: killed while they write, at work at the same time, and forked."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from vllm_mmcache.components.features.disk import DiskTier

from tests.support.packages import features, held_bytes, identity, load, packed, save
from vllm_mmcache.components.features.package import Shape, unpack

pytestmark = pytest.mark.process

NUM_PACKAGES = 40
SHAPE = Shape(1024, 128, "bfloat16")  # 256 KiB
SIZE_BYTES = len(packed(0, SHAPE))
BUDGET_BYTES = 10 * SIZE_BYTES


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for number in range(NUM_PACKAGES):
        (folder / identity(number).key).write_bytes(packed(number, SHAPE))
    return folder


def start(place: Path, source: Path, seed: int, *rounds: str) -> "subprocess.Popen[str]":
    arguments = [str(place), str(source), str(BUDGET_BYTES), str(seed), *rounds]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.writer_process", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]
    return process


def assert_only_good_packages(tier: DiskTier) -> None:
    for entry in tier.directory.packages():
        stored, _, _ = unpack(entry.path.read_bytes())
        assert stored.key == entry.key


def test_killed_fifty_times_while_writing(tmp_path: Path, source: Path) -> None:
    unfinished = round_ = 0
    while round_ < 50 or unfinished <= 3:  # else nothing was killed where it matters
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
        round_ += 1
    assert save(tier, -1)
    assert not (tier.directory.root / "incoming").exists()
    assert load(tier, -1) == features(-1)
    assert tier.counters.snapshot()["held_bytes"] == held_bytes(tmp_path) <= BUDGET_BYTES


def test_processes_keep_one_budget(tmp_path: Path, source: Path) -> None:
    processes = [start(tmp_path, source, seed, "150") for seed in range(3)]
    tier = DiskTier(tmp_path, BUDGET_BYTES)
    peak, runs = 0, True
    while runs:  # and once more when they have ended
        runs = any(process.poll() is None for process in processes)
        peak = max(peak, held_bytes(tmp_path))
        for number in range(0, NUM_PACKAGES, 5):
            assert load(tier, number, SHAPE) in (None, features(number, SHAPE))
    assert [process.communicate()[1] for process in processes] == [""] * 3
    assert [process.returncode for process in processes] == [0] * 3
    assert 0.8 * BUDGET_BYTES < peak <= BUDGET_BYTES + SIZE_BYTES
    assert_only_good_packages(tier)
    counts = tier.counters.snapshot()
    assert counts["hits"] > 0
    assert (counts["set_aside"], counts["errors"]) == (0, 0)


FORK = """
import os, sys
from tests.support.packages import features, load, save
from vllm_mmcache.components.features.disk import DiskTier

tier = DiskTier(sys.argv[1], 1 << 26)
assert save(tier, 0)
child = os.fork()
number = 1 if child else 2
for again in range(20):
    assert save(tier, number)
assert load(tier, 0) == features(0)
assert load(tier, number) == features(number)
if child:
    assert os.waitpid(child, 0)[1] == 0
    assert load(tier, 2) == features(2)
"""


def test_a_forked_child_goes_on(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORK, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
