# SPDX-License-Identifier: Apache-2.0
"""`mmcache doctor --ray` before a real cluster of several nodes on this machine, one after the other made unlike.

Needs `pip install '.[ray]'`.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vllm_mmcache
from vllm_mmcache.base.errors import EnvironmentProblem
from vllm_mmcache.cli import doctor_text, ray_nodes

pytest.importorskip("ray", reason="pip install '.[ray]'")
pytestmark = [pytest.mark.process, pytest.mark.xdist_group("ray_data")]

MISSING = 'raise ModuleNotFoundError("No module named vllm_mmcache", name="vllm_mmcache")'
OTHER = '__version__ = "0.0.7"'


@contextlib.contextmanager
def cluster(*environments: dict[str, str]) -> Iterator[str]:
    """The address of a cluster with a node for each of these variables."""
    from ray.cluster_utils import Cluster

    made = Cluster()
    try:
        for number, variables in enumerate(environments):
            made.add_node(num_cpus=1, env_vars=variables, **({"include_dashboard": False} if number == 0 else {}))
        yield made.address
    finally:
        made.shutdown()


def doctor(address: str, where: Path) -> tuple[int, dict[str, Any]]:
    """Exit status and report. where: a directory without modules, since Ray's workers import from the driver's, too."""
    command = [sys.executable, "-m", "vllm_mmcache.cli", "doctor", "--ray", address, "--json"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MMCACHE_")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=where, timeout=300, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def of_nodes(report: dict[str, Any]) -> list[str]:
    return [finding["seen"] for finding in report["findings"] if "node" in finding["where"]]


def test_nodes_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    variables = {"MMCACHE_STORE": "redis://:a-secret@cache:6379"}
    with cluster(variables, variables) as address:
        _, report = doctor(address, tmp_path)
    assert of_nodes(report) == []
    assert [row["mmcache"] for row in report["ray_nodes"]] == [vllm_mmcache.__version__] * 2
    assert all("vllm" in row["vllm"] and "cache:6379" in row["settings"]["store"] for row in report["ray_nodes"])
    assert "a-secret" not in json.dumps(report)
    monkeypatch.setenv("COLUMNS", "1000")
    doctor_text.show(report, with_settings=False)
    assert report["ray_nodes"][0]["node"] in capsys.readouterr().out


def test_nodes_unlike(tmp_path: Path) -> None:
    """Without the plugin, with another version, with wrong settings, left out, and with a setting of its own."""
    for name, text in (("missing", MISSING), ("other", OTHER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vllm_mmcache.py").write_text(text)
    path = os.environ.get("PYTHONPATH", "")
    environments: list[dict[str, str]] = [
        {},
        {"PYTHONPATH": f"{tmp_path / 'missing'}{os.pathsep}{path}"},
        {"PYTHONPATH": f"{tmp_path / 'other'}{os.pathsep}{path}"},
        {"MMCACHE_BLOCK_KEYS": "maybe"},
        {"VLLM_PLUGINS": "another"},
        {"MMCACHE_FEATURES": "0"},
    ]
    with cluster(*environments) as address:
        status, report = doctor(address, tmp_path)
    assert status == 1
    assert len(report["ray_nodes"]) == len(environments)
    seen = of_nodes(report)
    for what in ("not installed", "is not a package", "BLOCK_KEYS", "VLLM_PLUGINS=another", "'features': 'False'"):
        assert sum(what in one for one in seen) == 1, (what, seen)
    assert len(seen) == len(environments) - 1
    assert {row["mmcache"] for row in report["ray_nodes"]} == {vllm_mmcache.__version__, "0.0.7", None}


def test_no_cluster() -> None:
    with pytest.raises(EnvironmentProblem, match="no Ray cluster at nowhere"):
        ray_nodes.nodes("nowhere")


def test_nobody_listens() -> None:
    """Said at once: Ray itself would ask for minutes."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody listens, and nobody else gets it
        port = bound.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
            with pytest.raises(EnvironmentProblem, match="ConnectionRefusedError"):
                ray_nodes.nodes(address)
