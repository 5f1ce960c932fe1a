# SPDX-License-Identifier: Apache-2.0
"""The torchvision hook, the checks and the repair, on fake packages and on the real ones of this environment.

Every test runs Python in a subprocess: the hook acts at start-up and at the first import. The real-package
test makes a virtual environment whose site-packages lie over this one's, and breaks it the way pip's
resolution does.
"""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import vllm_mmcache
from tests.support.programs import cpu_seconds
from vllm_mmcache.environment import hook
from vllm_mmcache.environment.checks import diagnose

pytestmark = pytest.mark.process

ROOT = Path(vllm_mmcache.__file__).parent.parent
BROKEN_BUILD = (hook.installed_version("torchvision") or "").partition("+")[2].startswith("cu") and (
    hook.installed_version("torch") or ""
).endswith("+cpu")

TORCH = """
from torch import library
"""
TORCH_LIBRARY = """
DEFINED = []
class Library:
    def __init__(self, name, kind):
        assert (name, kind) == ("torchvision", "DEF")
    def define(self, schema):
        DEFINED.append(schema.split("(")[0])
"""
TORCHVISION = """
import torch.library
if torch.library.DEFINED != {expected}:
    raise RuntimeError("operator torchvision::nms does not exist")
"""


def run(python: str | Path, *args: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(python), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environ_of(path))


def environ_of(path: Path | None) -> dict[str, str]:
    environ = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    return environ | ({} if path is None else {"PYTHONPATH": str(path)})


def make_package(site: Path, name: str, version: str, text: str) -> None:
    package = site / name
    package.mkdir()
    (package / "__init__.py").write_text(text)
    (package / "version.py").write_text(f"__version__ = {version!r}\n")
    info = site / f"{name}-{version.partition('+')[0]}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version.partition('+')[0]}\n")
    (info / "RECORD").write_text(
        "".join(f"{file},,\n" for file in (f"{name}/__init__.py", f"{name}/version.py"))
        + "".join(f"{info.name}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD"))
    )
    (info / "INSTALLER").write_text("pip\n")


class Environment:
    """A virtual environment with fake torch and torchvision, and pip borrowed from this one."""

    def __init__(self, directory: Path) -> None:
        venv.create(directory, with_pip=False, symlinks=True)
        self.python = directory / "bin" / "python"
        self.site = next((directory / "lib").glob("python*")) / "site-packages"
        (self.site / "pip").symlink_to(Path(sysconfig.get_paths()["purelib"]) / "pip")

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        return run(self.python, *args)

    def repair(self, *args: str) -> subprocess.CompletedProcess[str]:
        return run(self.python, "-m", "vllm_mmcache.environment", *args, path=ROOT)


@pytest.fixture
def broken(tmp_path: Path) -> Environment:
    environment = Environment(tmp_path / "venv")
    make_package(environment.site, "torch", "2.13.0+cpu", TORCH)
    (environment.site / "torch" / "library.py").write_text(TORCH_LIBRARY)
    make_package(environment.site, "torchvision", "0.28.0+cu130", TORCHVISION.format(expected=["nms", "qnms"]))
    make_package(environment.site, "torchaudio", "2.11.0", "raise OSError('libcudart.so.13: no such file')")
    return environment


def test_repair_cures_and_is_quick_and_silent_the_second_time(broken: Environment) -> None:
    assert broken.run("-c", "import torchvision").returncode != 0
    first = broken.repair()
    assert first.returncode == 0, first.stderr
    assert "uninstalled torchaudio: OSError: libcudart.so.13: no such file" in first.stdout
    assert "torchvision 0.28.0+cu130 beside torch 2.13.0+cpu" in first.stdout
    assert broken.run("-c", "import torchvision").returncode == 0
    assert not (broken.site / "torchaudio").exists()
    command = [str(broken.python), "-m", "vllm_mmcache.environment"]
    # Processor time: the wall clock says nothing on a busy machine.
    second, seconds = cpu_seconds(command, environ_of(ROOT))
    assert second.stdout == "environment: nothing to repair\n"
    assert seconds < 0.5
    # A package that comes back (pip install) must not hide behind the stamp.
    make_package(broken.site, "torchaudio", "2.11.0", "raise OSError('again')")
    assert "uninstalled torchaudio" in broken.repair().stdout


def test_hook_does_nothing_beside_another_build(broken: Environment) -> None:
    broken.repair()
    # A CPU build that brings its own operators would fail on ours, so none may be defined.
    (broken.site / "torchvision" / "__init__.py").write_text(TORCHVISION.format(expected=[]))
    assert broken.run("-c", "import torchvision").returncode != 0
    (broken.site / "torchvision" / "version.py").write_text("__version__ = '0.28.0+cpu'\n")
    assert broken.run("-c", "import torchvision").returncode == 0
    outcome = broken.repair()
    assert "removed the torchvision hook" in outcome.stdout
    assert not list(broken.site.glob("_mmcache_torchvision_hook*"))


def test_hook_does_nothing_beside_another_torch(broken: Environment) -> None:
    broken.repair()
    (broken.site / "torchvision" / "__init__.py").write_text(TORCHVISION.format(expected=[]))
    (broken.site / "torch" / "version.py").write_text("__version__: str = '2.13.0+cu130'\n")
    assert broken.run("-c", "import torchvision").returncode == 0


def test_hook_is_cheap_and_alone(broken: Environment) -> None:
    broken.repair()
    # vllm_mmcache is not importable here (no PYTHONPATH), and torch is not imported before torchvision.
    seen = broken.run("-c", "import sys; print('torch' in sys.modules, 'vllm_mmcache' in sys.modules)")
    assert (seen.stdout, seen.stderr) == ("False False\n", "")
    next(broken.site.glob("_mmcache_torchvision_hook.py")).unlink()
    seen = broken.run("-c", "print('alive')")
    assert (seen.stdout, seen.stderr) == ("alive\n", "")


def test_cuda_torch_is_reported_not_repaired(broken: Environment) -> None:
    (broken.site / "torch" / "version.py").write_text("__version__ = '2.13.0+cu130'\n")
    outcome = broken.repair()
    assert outcome.returncode == 2
    assert "install the build of torchaudio that matches torch" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert (broken.site / "torchaudio").exists()


@pytest.mark.skipif(not BROKEN_BUILD, reason="torchvision here is not a CUDA build beside a CPU torch")
def test_the_real_torchvision(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    here = Path(sysconfig.get_paths()["purelib"])
    # A plain path in a .pth file: the packages of this environment, without its own start-up hooks.
    (environment.site / "beneath.pth").write_text(f"{here}\n")
    code = "import torchvision.transforms.v2; print(torchvision.__version__)"
    assert "torchvision::nms does not exist" in environment.run("-c", code).stderr
    outcome = environment.repair()
    assert outcome.returncode == 0, outcome.stderr
    assert "start-up hook for torchvision" in outcome.stdout
    assert environment.run("-c", code).stdout.strip() == hook.installed_version("torchvision")
    # Spawned processes, as vLLM's engine and workers are.
    spawn = (
        "import multiprocessing as m\n"
        "def f(q):\n    import torchvision; q.put(torchvision.__version__)\n"
        "if __name__ == '__main__':\n"
        "    c = m.get_context('spawn'); q = c.Queue(); p = c.Process(target=f, args=(q,)); p.start()\n"
        "    print(q.get(timeout=100)); p.join()\n"
    )
    script = tmp_path / "spawn.py"
    script.write_text(spawn)
    assert environment.run(str(script)).stdout.strip() == hook.installed_version("torchvision")


def test_this_environment_is_well() -> None:
    assert diagnose() == []


def test_module_versions_are_found_without_an_import() -> None:
    code = (
        "import sys; from vllm_mmcache.environment.hook import installed_version as v;"
        "print(v('torch'), v('no_such_package'), 'torch' in sys.modules)"
    )
    outcome = run(sys.executable, "-c", code, path=ROOT)
    assert outcome.stdout.split() == [hook.installed_version("torch"), "None", "False"]
