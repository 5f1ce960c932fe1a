# SPDX-License-Identifier: Apache-2.0
"""What a pod's limits do to what writes, without an engine: real mounts, an unknown user, no home directory."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.system.kubernetes.container import REPO, in_namespace, in_pod

pytestmark = pytest.mark.process

PYTHON = sys.executable


def run(command: list[str], *, seconds: float = 120, **variables: Any) -> "subprocess.CompletedProcess[str]":
    """Run a command of container.py without a home directory."""
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), **variables}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=seconds)


def python_in_pod(code: str, folder: Path, *arguments: str, volume_bytes: int = 1 << 30, **variables: Any) -> str:
    """What a program says that runs in a pod and succeeds."""
    command = in_pod([PYTHON, "-c", code, *arguments], folder, volume_bytes=volume_bytes)
    done = run(command, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


LIMITS = """
import os, pwd, shutil, sys
from pathlib import Path
folder = Path(sys.argv[1])
assert (os.getuid(), os.getgid(), os.environ.get("HOME")) == (12345, 0, None)
try:
    raise SystemExit(f"{pwd.getpwuid(os.getuid())} is known")
except KeyError:
    pass
def is_writable(place):
    try:
        (place / "written").write_bytes(b"")
    except OSError:
        return False
    return True
read_only = ["/", "/etc", "/root", sys.prefix, Path.cwd(), folder]
assert not any(is_writable(Path(place)) for place in read_only)
assert all(is_writable(Path(place)) for place in ("/tmp", "/dev/shm", folder / "volume"))
assert shutil.disk_usage("/dev/shm").total == 64 << 20
assert shutil.disk_usage(folder / "volume").total == 1 << 20
"""


def test_the_limits_are_real(tmp_path: Path) -> None:
    """Negative control of what follows."""
    python_in_pod(LIMITS, tmp_path, str(tmp_path), volume_bytes=1 << 20)


HOMELESS = """
from vllm_mmcache.base import settings
from vllm_mmcache.base.directories import default_directory
from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.lifecycle import user_proofs
assert default_directory() is None
assert user_proofs.read() == ([], []), user_proofs.read()
for name in ("store", "store_key_file", "observe_file", "admin_key_file"):
    try:
        settings.load_settings({name: "~/a"})
    except SettingsError as error:
        print(error)
    else:
        raise SystemExit(f"{name} was taken")
"""


def test_without_a_home_directory(tmp_path: Path) -> None:
    """What needs none says nothing; what was asked to be in it is refused in one sentence each."""
    said = python_in_pod(HOMELESS, tmp_path).splitlines()
    assert "no user of '~/a'" in said[0]
    for name, line in zip(("store_key_file", "observe_file", "admin_key_file"), said[1:], strict=True):
        assert f"{name} = '~/a' is not allowed: there is no user of that name, or no home directory" in line


ARENA = """
import os, shutil, subprocess, sys
from vllm_mmcache.components.features.arena import Arena
before = shutil.disk_usage("/dev/shm").used
arena = Arena.create(256 << 20, 1)
arena.buffer(0, 256 << 20)[:] = b"x" * (256 << 20)
opened = "import sys; from vllm_mmcache.components.features.arena import Arena; "
opened += "Arena.open(sys.argv[1]).buffer(7, 1)[:] = b'y'"
subprocess.run([sys.executable, "-c", opened, arena.address], check=True)  # as a worker does
assert bytes(arena.buffer(6, 3)) == b"xyx"
assert shutil.disk_usage("/dev/shm").used == before == 0
assert os.listdir("/dev/shm") == []
"""


def test_features_in_ram_are_not_in_dev_shm(tmp_path: Path) -> None:
    """256 MiB that processes share, all written, where /dev/shm has 64 MiB."""
    python_in_pod(ARENA, tmp_path)


STORE = """
import logging, sys, time
from pathlib import Path
from types import SimpleNamespace
from tests.support.packages import features, file_tier, load, save
from tests.support.tiers import record_tier
from vllm_mmcache.storage import breaker, frame
from vllm_mmcache.components.features.package import Shape

logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
ahead_s = 0
breaker.time = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s)
volume = Path(sys.argv[1]) / "volume"
store = volume / "store"
tier, records = file_tier(store, 1 << 30), record_tier(store, 1 << 30)
shape = Shape(256, 64, "bfloat16")
key = frame.key("test")

def use(number):
    '''Whether a package and a record are kept, each; what is kept is right.'''
    found = save(tier, number, shape)
    assert not found or load(tier, number, shape) == features(number, shape)
    records.put_many({key: b"%d" % number})
    hit = records.get(key, bytes)
    return found, hit is not None and hit[1] == b"%d" % number
"""

FULL = """
with open(volume / "of others", "wb", buffering=0) as large:
    try:
        while True:
            large.write(bytes(4096))
    except OSError:
        pass
assert [use(number) for number in range(20)] == [(False, False)] * 20
(volume / "of others").unlink()
assert use(20) == (False, False)  # it rests
ahead_s += 10_000
assert use(21) == (True, True)
assert {path.stat().st_mode & 0o777 for path in (store, store / "features", store / "records")} == {0o700}
"""


def test_a_volume_that_is_full(tmp_path: Path) -> None:
    said = python_in_pod(STORE + FULL, tmp_path, str(tmp_path), volume_bytes=1 << 20).splitlines()
    assert sum("is off, and is tried again" in line for line in said) == 2, said  # features, records
    assert all("is off" in line or "works again" in line for line in said), said


LATE = """
import subprocess
assert [use(number) for number in range(20)] == [(False, False)] * 20
assert not store.exists()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=2770", "volume", volume], check=True)
assert use(20) == (False, False)  # it rests
ahead_s += 10_000
assert use(21) == (True, True)
assert use(22) == (True, True)
"""

# Without a read-only root the store is begun below the mount point, and then lies under the volume.
OVER_ANOTHER = """
import subprocess
assert use(0) == (True, True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=2770", "volume", volume], check=True)
assert load(tier, 0, shape) is None
assert records.get(key, bytes) is None
assert use(1) == (True, True)
assert sorted(path.name for path in store.iterdir()) == ["features", "records"]
"""


@pytest.mark.parametrize("script", [LATE, OVER_ANOTHER], ids=["read-only root", "root that can be written"])
def test_a_volume_that_arrives_late(script: str, tmp_path: Path) -> None:
    """Mounted after the start: it is used after a rest at the latest, and until then requests go on without it."""
    (tmp_path / "volume").mkdir()
    code = tmp_path / "code.py"
    code.write_text(STORE + script)
    root = 'mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"; ' if script is LATE else ""
    done = run(in_namespace(f'{root}exec "$2" "$1/code.py" "$1"', tmp_path))
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    off = [line for line in said if "is off, and is tried again" in line]
    assert len(off) == (2 if script is LATE else 0), said  # features, records
    assert len(said) == 2 * len(off), said
    assert sum("works again" in line for line in said) == len(off)


def test_doctor_finds_nothing_wrong(tmp_path: Path) -> None:
    """It imports vLLM and asks for every setting, and writes nothing that is needed."""
    done = run(in_pod([PYTHON, "-m", "vllm_mmcache.cli", "doctor"], tmp_path), seconds=300, MMCACHE_STORE="/tmp/store")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
