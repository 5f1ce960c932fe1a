# SPDX-License-Identifier: Apache-2.0
"""A disk that is full or read-only, on real mounts in a namespace: one line, misses, and it is tried again."""

import subprocess
import sys
from pathlib import Path

import pytest

UNSHARE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]

COMMON = """
import logging, subprocess, sys, time
from types import SimpleNamespace
from vllm_mmcache.storage import breaker, records
from vllm_mmcache.storage.records.disk import DiskPlace
from vllm_mmcache.storage.records.records import Records

logging.basicConfig(format="%(message)s")
ahead_s = 0
breaker.time = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s)
place = DiskPlace(sys.argv[1], 1 << 30, rest_s=1000)
key = lambda number: records.key("test", str(number))
value = lambda number: b"%d " % number * 2000

def kept(number):
    found = place.get(key(number))
    assert found is None or found.value == value(number)
    return found is not None
"""

FULL = """
for number in range(300):
    place.save({key(number): value(number)})
counts = place.counts.snapshot()
assert counts["errors"] == 1 and counts["dropped"] == 300 - counts["saved"], counts
assert [kept(number) for number in range(300)].count(True) == counts["saved"] > 20, counts
assert place.counts.snapshot()["errors"] == 1
place.remove()
ahead_s += 10_000  # it has rested
place.save({key(0): value(0)})
assert kept(0)
"""

FULL_FROM_THE_START = """
with open(sys.argv[1] + "/large", "wb", buffering=0) as large:
    try:
        while True:
            large.write(bytes(4096))
    except OSError:
        pass
for number in range(20):
    place.save({key(number): value(number)})
    assert not kept(number)
assert place.counts.snapshot()["errors"] <= 2, place.counts.snapshot()
"""

READ_ONLY = """
place.save({key(0): value(0)})
place.close()
subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
for _ in range(20):
    assert kept(0)
    place.save({key(1): value(1)})
assert place.counts.snapshot()["errors"] == 1, place.counts.snapshot()
subprocess.run(["mount", "-o", "remount,rw", sys.argv[1]], check=True)
ahead_s += 10_000  # it has rested
assert kept(0)
place.save({key(1): value(1)})
assert kept(1)
"""

READ_ONLY_FROM_THE_START = """
subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
everything = Records(1 << 20, [place])
for _ in range(20):
    everything.put(key(0), value(0))
    assert everything.flush(60)
    assert not kept(0)
    assert everything.get(key(0)) == value(0)  # from RAM
assert place.counts.snapshot()["errors"] == 1, place.counts.snapshot()
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "script",
    [FULL, FULL_FROM_THE_START, READ_ONLY, READ_ONLY_FROM_THE_START],
    ids=["full", "full from the start", "read-only", "read-only from the start"],
)
def test_failures(script: str, tmp_path: Path) -> None:
    if subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("user namespaces are not allowed here")
    mount = f"mount -t tmpfs -o size=1m,mode=0700 tmpfs {tmp_path}"
    command = [*UNSHARE, f'{mount}; exec "$0" "$@"', sys.executable, "-c", COMMON + script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert sum("is off" in line for line in lines) == 1, lines
    assert all("is off" in line or "works again" in line for line in lines), lines
    assert len(lines) <= 4
