# SPDX-License-Identifier: Apache-2.0
"""The two distributions of this repository: vllm-mmcache, for servers, and vllm-mmcache-tools, each with its package.

Both wheels are built as pip builds them, without a network, and installed into an environment of their own.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from vllm_mmcache import __version__
from vllm_mmcache.environment.repair import PTH_LINE

pytestmark = pytest.mark.process

REPO = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
ADDRESS = "https://github.com/vllm-mmcache/vllm-mmcache"
VERBS = ("demo", "lint", "zoo")
# What the packages are never without.
DATA = {f"components/observe/page/{name}" for name in ("index.html", "page.css", "page.js")}
DATA |= {"hooking/source_digests.json", "lifecycle/tested_engines.json"}
TOOLS_DATA = {f"zoo/seeing/{name}" for name in ("measured.json", "model.safetensors", "tokenizer.json")}
TOOLS_DATA |= {"zoo/templates/qwen3_vl.jinja"}


def project(folder: str) -> dict[str, Any]:
    return tomllib.loads((REPO / folder / "pyproject.toml").read_text())


def run(*command: str | Path, **more: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(list(command), capture_output=True, text=True, check=False, timeout=300, **more)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheel for servers, and that of the tools."""
    folder = tmp_path_factory.mktemp("wheels")
    for source in (REPO, REPO / "tools"):
        options = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(folder)]
        done = run(*PIP, "wheel", *options, source)
        assert done.returncode == 0, done.stdout + done.stderr
    both = [folder / f"{name}-{__version__}-py3-none-any.whl" for name in ("vllm_mmcache", "vllm_mmcache_tools")]
    assert sorted(folder.iterdir()) == both
    return both


def files(wheel: Path) -> set[str]:
    """Its files, but for those about the distribution."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def about(wheel: Path, name: str) -> str:
    """A file about the distribution."""
    with zipfile.ZipFile(wheel) as archive:
        found = [path for path in archive.namelist() if path.endswith(f".dist-info/{name}")]
        return archive.read(found[0]).decode() if found else ""


def test_each_file_is_in_its_wheel(wheels: list[Path]) -> None:
    for wheel, folder in zip(wheels, (REPO, REPO / "tools"), strict=True):
        package = "vllm_mmcache" if folder == REPO else "mmcache_tools"
        options = ["--cached", "--others", "--exclude-standard"]
        listed = run("git", "ls-files", *options, package, cwd=folder).stdout.splitlines()
        assert files(wheel) == {name for name in listed if (folder / name).exists()}
    server, tools = map(files, wheels)
    needed = {*DATA, "__init__.py", "plugin.py", "client/__init__.py", "cli/__init__.py", "cli/__main__.py"}
    assert server >= {f"vllm_mmcache/{name}" for name in needed}
    assert tools >= {f"mmcache_tools/{name}" for name in {*TOOLS_DATA, "zoo/__init__.py"}}


def test_what_they_say_of_themselves(wheels: list[Path]) -> None:
    server, tools = wheels
    assert re.findall("^Requires-Dist: (.*)$", about(tools, "METADATA"), re.MULTILINE) == [
        f"vllm-mmcache=={__version__}"
    ]
    assert about(tools, "entry_points.txt") == ""
    written = about(server, "entry_points.txt")
    for place in ("vllm_mmcache.plugin:register", "vllm_mmcache.cli:main"):
        assert f"mmcache = {place}\n" in written
    for name in ("requires-python", "license", "license-files"):
        assert project(".")["project"][name] == project("tools")["project"][name]
    assert project(".")["build-system"] == project("tools")["build-system"]


def test_they_have_the_license_their_types_and_the_projects_address(wheels: list[Path]) -> None:
    text = (REPO / "LICENSE").read_text()
    assert "Apache License" in text
    for wheel, package in zip(wheels, ("vllm_mmcache", "mmcache_tools"), strict=True):
        metadata = about(wheel, "METADATA")
        assert "License-Expression: Apache-2.0\nLicense-File: LICENSE\n" in metadata
        assert about(wheel, "licenses/LICENSE") == text
        assert f"{package}/py.typed" in files(wheel)
        assert "Classifier: Typing :: Typed\n" in metadata
        urls = re.findall("^Project-URL: (.*), (.*)$", metadata, re.MULTILINE)
        assert {label for label, _ in urls} >= {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
        for _, url in urls:
            rest = url.removeprefix(ADDRESS)
            assert rest != url, url
            assert rest in ("", "/issues") or (REPO / re.sub("^/(blob|tree)/main/", "", rest)).exists(), url


class Environment:
    """A virtual environment of its own; what the package needs comes from that of the tests, but not the package."""

    def __init__(self, folder: Path) -> None:
        done = run(sys.executable, "-m", "venv", "--without-pip", folder)
        assert done.returncode == 0, done.stderr
        self.folder = folder
        (self.place,) = folder.glob("lib/python*/site-packages")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MMCACHE_")}
        # On PYTHONPATH its .pth files are not read, with which the package would come; torchvision may need one.
        self.environ = {**kept, "PYTHONPATH": sysconfig.get_path("purelib")}
        (self.place / "torchvision.pth").write_text(PTH_LINE)

    def pip(self, *arguments: str | Path) -> None:
        done = run(*PIP, "--python", str(self.folder), *map(str, arguments))
        assert done.returncode == 0, done.stdout + done.stderr

    def mmcache(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return run(self.folder / "bin" / "mmcache", *arguments, env=self.environ, cwd=self.folder)

    def python(self, code: str) -> "subprocess.CompletedProcess[str]":
        return run(self.folder / "bin" / "python", "-c", code, env=self.environ, cwd=self.folder)

    def packages(self) -> set[str]:
        """The files of the installed packages, but for compiled ones."""
        found = (path for name in ("vllm_mmcache", "mmcache_tools") for path in (self.place / name).rglob("*"))
        return {str(path.relative_to(self.place)) for path in found if path.is_file() and path.suffix != ".pyc"}


# Imports every module of a package, and says where the tools are and what is loaded of them.
IMPORT_ALL = """
import importlib, pkgutil, sys
import {package} as package
names = [one.name for one in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
print(importlib.util.find_spec("mmcache_tools"), *sorted(name for name in sys.modules if name.startswith({package!r})))
"""


def test_a_model_of_ones_own_is_proven_without_the_tools(wheels: list[Path], tmp_path: Path) -> None:
    """All that `mmcache prove --own` runs can be imported, and the command gets as far as the model."""
    here = Environment(tmp_path / "venv")
    here.pip("install", "--no-deps", "--no-index", wheels[0])
    done = here.python(IMPORT_ALL.format(package="vllm_mmcache.prove"))
    assert done.returncode == 0, done.stderr
    tools, *loaded = done.stdout.strip().splitlines()[-1].split()
    assert tools == "None"
    assert {f"vllm_mmcache.prove.{name}" for name in ("own_checks", "proving", "worker")} <= set(loaded)
    done = here.mmcache("prove", str(tmp_path), "--own")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: the config of {tmp_path} can't be read"), done.stderr
    done = here.mmcache("prove", str(tmp_path))
    assert "a check on the zoo's models needs vllm-mmcache-tools, which is not installed" in done.stderr, done.stderr


def test_tools_come_and_go(wheels: list[Path], tmp_path: Path) -> None:
    server, tools = wheels
    here = Environment(tmp_path / "venv")
    here.pip("install", "--no-deps", "--no-index", server)
    assert here.packages() == files(server)
    shown = here.mmcache("--help")
    assert shown.returncode == 0, shown.stderr
    for verb in VERBS:
        assert re.search(rf"^ +{verb} +Needs vllm-mmcache-tools: ", shown.stdout, re.MULTILINE)
    for arguments in (["demo"], ["demo", "--help"], ["lint", "a", "b", "--json"], ["zoo"], ["zoo", "build", "x", "y"]):
        done = here.mmcache(*arguments)
        start = f"mmcache {arguments[0]} needs vllm-mmcache-tools, which is not installed: pip install "
        assert done.stderr.startswith(f"error: {start}"), done.stderr
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        if "--json" in arguments:
            assert json.loads(done.stdout)["error"].startswith(start), done.stdout
        else:
            assert done.stdout == ""

    here.pip("install", "--no-deps", "--no-index", tools)
    assert here.packages() == files(server) | files(tools)
    done = here.mmcache("zoo", "ls")
    assert done.returncode == 0, done.stderr
    assert {"qwen3-vl", "seeing"} <= set(done.stdout.split())
    assert "Needs vllm-mmcache-tools" not in here.mmcache("--help").stdout
    assert "Usage: mmcache lint" in here.mmcache("lint", "--help").stdout

    here.pip("uninstall", "--yes", "vllm-mmcache-tools")
    assert here.packages() == files(server)
    assert "which is not installed" in here.mmcache("zoo", "ls").stderr
    assert here.mmcache("explain", "--help").returncode == 0
