# SPDX-License-Identifier: Apache-2.0
"""A volume whose modes somebody widened: set right from the command line, and left where chmod is refused."""

import subprocess
from pathlib import Path

import pytest

from tests.system.kubernetes.container import in_namespace
from tests.unit.storage.test_directories import fill, widen
from vllm_mmcache.storage import directories


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "_said", set())


@pytest.mark.process
def test_the_command_line_sets_it_right_too(tmp_path: Path) -> None:
    from tests.system.cli.test_commands import mmcache

    fill(tmp_path)
    widen(tmp_path)
    done = mmcache("store", "check", "--dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "1 packages are good" in done.stdout


READ_ONLY = """
mount -t tmpfs -o size=1m,mode=0770 none "$1"
mkdir --mode=0770 "$1/features"
mount -o remount,ro "$1"
exec "$2" -c 'import sys; from pathlib import Path; from vllm_mmcache.storage.directories import is_ours
is_ours(Path(sys.argv[1]) / "features")' "$1"
"""


@pytest.mark.process
def test_a_volume_where_chmod_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(in_namespace(READ_ONLY, tmp_path), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "StoreUnusable" in done.stderr
    assert "has mode drwxrwx---" in done.stderr
    assert "Read-only file system" in done.stderr
