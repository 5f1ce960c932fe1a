# SPDX-License-Identifier: Apache-2.0
"""A disk that is full or read-only, on real mounts in a namespace: one line in the log each, and serving goes on."""

import sys
from pathlib import Path

import pytest

from tests.support.refusals import in_namespace

pytestmark = pytest.mark.process

COMMON = """
import logging, subprocess, sys, time
from types import SimpleNamespace
from tests.support.packages import held_bytes
from tests.support.storage_contract import CONTENTS, counts
from tests.support.writer_process import open_backend
from vllm_mmcache.storage import breaker
from vllm_mmcache.storage.tier import Tier

logging.basicConfig(format="%(message)s")
logging.getLogger("vllm.mmcache").setLevel("INFO")
which, place = sys.argv[1:]
ahead_s = 0
breaker.time = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s)
contents = CONTENTS["small things"]
tier = Tier(contents.kind, open_backend(which, place, 1 << 30), rest_s=(1000, 1000))

def put(number):
    return contents.put(tier, number)

def has(number):
    found = contents.find(tier, number)
    assert found in (None, contents.content(number))
    return found is not None

def put_large(number, num_bytes):
    before = counts(tier)["saved"]
    tier.put_many({b"%032d" % number: bytes(num_bytes)})
    return counts(tier)["saved"] > before

def mount(how):
    tier.close()
    subprocess.run(["mount", "-o", "remount," + how, place], check=True)
"""

FULL = """
kept = [number for number in range(1000) if put(number)]
assert [number for number in range(1000) if has(number)] == kept == list(range(len(kept))) and len(kept) > 50, kept
assert counts(tier)["errors"] == 1 and counts(tier)["dropped"] == 1000 - len(kept), counts(tier)
assert counts(tier)["rejected"] == 0
tier.backend.clear()
ahead_s += 10_000
assert put(1000) and has(1000)
"""

FULL_IN_THE_MIDDLE = """
assert put(0)
num_kept = 0
while put_large(100 + num_kept, 60_000):
    num_kept += 1
assert num_kept > 5 and counts(tier)["errors"] == 1
if which == "files":
    assert not (tier.backend.root / "incoming").exists()
    assert int((tier.backend.root / "lock").read_text()) == held_bytes(place)
assert len(list(tier.backend.scan())) == 1 + num_kept and has(0)
assert tier.backend.verify() is None
ahead_s += 10_000
tier.backend.clear()  # removes files: SQLite itself needs room to remove a row
assert put(2) and has(2)
"""

FULL_FROM_THE_START = """
with open(place + "/large", "wb", buffering=0) as large:
    try:
        while True:
            large.write(bytes(4096))
    except OSError:
        pass
for number in range(20):
    assert not put(number) and not has(number)
assert counts(tier)["errors"] <= 2, counts(tier)
subprocess.run(["rm", place + "/large"], check=True)
ahead_s += 10_000
assert put(0) and has(0)
"""

READ_ONLY = """
assert put(0)
mount("ro")
for number in range(1, 20):
    assert not put(number) and has(0) and not has(number)
assert counts(tier)["errors"] == 1 and counts(tier)["dropped"] == 19, counts(tier)
mount("rw")
ahead_s += 10_000
assert has(0) and put(1) and has(1)
"""

READ_ONLY_FROM_THE_START = """
mount("ro")
for number in range(20):
    assert not put(number) and not has(number)
assert counts(tier)["errors"] == 1, counts(tier)
mount("rw")
ahead_s += 10_000
assert put(0) and has(0)
"""


@pytest.mark.parametrize("which", ["files", "sqlite"])
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (FULL, "No space left|disk is full"),
        (FULL_IN_THE_MIDDLE, "No space left|disk is full"),
        (FULL_FROM_THE_START, "No space left|disk is full"),
        (READ_ONLY, "Read-only file system|readonly database"),
        (READ_ONLY_FROM_THE_START, "Read-only file system|readonly database"),
    ],
    ids=["full", "full in the middle", "full from the start", "read-only", "read-only from the start"],
)
def test_a_disk_that_takes_no_more(script: str, reason: str, which: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMON + script, which, str(tmp_path)]
    process = in_namespace(f"mount -t tmpfs -o size=1m,mode=0700 tmpfs '{tmp_path}'", command)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    lines = said.splitlines()
    assert [("is off" in line, "works again" in line) for line in lines] == [(True, False), (False, True)], said
    assert any(words in lines[0] for words in reason.split("|")), said
