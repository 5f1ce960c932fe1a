# SPDX-License-Identifier: Apache-2.0
"""The command that messages name for what is missing: it must lead to where this package came from."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from vllm_mmcache.base import distributions

REPO = Path(__file__).parents[3]


class Distribution:
    """One whose files hold these texts."""

    def __init__(self, **files: str | None) -> None:
        self.files = files

    def read_text(self, name: str) -> str | None:
        return self.files.get(name.partition(".")[0])


SOURCES = Distribution()  # an egg-info beside the sources


def origin(monkeypatch: pytest.MonkeyPatch, said: str | None) -> None:
    """Let the distribution say that it came from there."""
    found = [SOURCES, Distribution(INSTALLER="pip", direct_url=said)]
    monkeypatch.setattr(metadata, "distributions", lambda name: iter(found))


@pytest.mark.parametrize(
    ("said", "command"),
    [
        (None, "pip install 'vllm-mmcache[cpu]'"),  # an index had it
        (
            {"url": "https://host.invalid/it.git", "vcs_info": {"vcs": "git", "commit_id": "5eed"}},
            "pip install 'vllm-mmcache[cpu] @ git+https://host.invalid/it.git@5eed'",
        ),
        (
            {"url": "file:///tmp/it.whl", "archive_info": {}},
            "pip install 'vllm-mmcache[cpu] @ file:///tmp/it.whl'",
        ),
        ({"url": "file:///no/such/clone", "dir_info": {}}, "pip install '.[cpu]' in a clone of vllm-mmcache"),
        ({"dir_info": {}}, "pip install '.[cpu]' in a clone of vllm-mmcache"),
        (["nonsense"], "pip install '.[cpu]' in a clone of vllm-mmcache"),
    ],
)
def test_install_command(said: Any, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    origin(monkeypatch, None if said is None else json.dumps(said))
    assert distributions.install_command("cpu") == command


def test_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = tmp_path / "my clone"
    clone.mkdir()
    (clone / "pyproject.toml").write_text("")
    origin(monkeypatch, json.dumps({"url": clone.as_uri(), "dir_info": {}}))
    assert distributions.install_command("cpu", "dev") == f"pip install '{clone}[cpu,dev]'"
    origin(monkeypatch, json.dumps({"url": clone.as_uri(), "dir_info": {"editable": True}}))
    assert distributions.install_command("cuda") == f"pip install -e '{clone}[cuda]'"


@pytest.mark.parametrize(
    ("said", "command"),
    [
        (None, "pip install vllm-mmcache-tools"),  # an index had both
        (
            {"url": "https://host.invalid/it.git", "vcs_info": {"vcs": "git", "commit_id": "5eed"}},
            "pip install 'vllm-mmcache-tools @ git+https://host.invalid/it.git@5eed#subdirectory=tools'",
        ),
        (
            {"url": "https://host.invalid/it.tar.gz", "archive_info": {}},
            "pip install 'vllm-mmcache-tools @ https://host.invalid/it.tar.gz#subdirectory=tools'",
        ),
        ({"url": "file:///tmp/it.whl", "archive_info": {}}, "pip install ./tools in a clone of vllm-mmcache"),
        ({"url": "file:///no/such/clone", "dir_info": {}}, "pip install ./tools in a clone of vllm-mmcache"),
        (["nonsense"], "pip install ./tools in a clone of vllm-mmcache"),
    ],
)
def test_tools_install_command(said: Any, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    origin(monkeypatch, None if said is None else json.dumps(said))
    assert distributions.tools_install_command() == command


def test_the_tools_of_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clone = tmp_path / "my clone"
    (clone / distributions.FOLDER).mkdir(parents=True)
    origin(monkeypatch, json.dumps({"url": clone.as_uri(), "dir_info": {}}))
    assert distributions.tools_install_command() == "pip install ./tools in a clone of vllm-mmcache", (
        "a clone from before the tools"
    )
    (clone / distributions.FOLDER / "pyproject.toml").write_text("")
    for how in ({}, {"editable": True}):
        origin(monkeypatch, json.dumps({"url": clone.as_uri(), "dir_info": how}))
        assert distributions.tools_install_command() == f"pip install '{clone}/tools'"


def test_not_installed_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ([], [SOURCES]):
        monkeypatch.setattr(metadata, "distributions", lambda name, found=found: iter(found))
        assert distributions.install_command("client") == "pip install '.[client]' in a clone of vllm-mmcache"


def test_every_extra_that_is_named_exists() -> None:
    import re
    import tomllib

    known = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        name
        for path in (REPO / "vllm_mmcache").rglob("*.py")
        for name in re.findall(r'distributions\.install_command\(["\'](\w+)', path.read_text())
    }
    assert named >= {"cpu", "cuda", "client", "encryption"}
    assert named <= set(known)
