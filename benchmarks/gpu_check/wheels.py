# SPDX-License-Identifier: Apache-2.0
"""Which wheels another machine lacks for vLLM and the plugin, downloaded by pip for that machine's Python.

pip can't resolve for a machine that has packages already, and an index may lack what vLLM pins. So the requirements
are followed here one level at a time: what the machine has and fits is left there, the rest is downloaded without its
dependencies, and they come next.
"""

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename

# Requirements of vLLM that the checks don't need: it looks whether they are there, or imports them where they are used.
LEFT_OUT: dict[str, str] = {
    "anthropic": "a server's",
    "fastsafetensors": "a loader of weights that is not the default",
    "flashinfer-python": "kernels that it compiles with nvcc; vLLM takes its own without it",
    "humming-kernels": "quantised models",
    "instanttensor": "a loader of weights that is not the default",
    "mcp": "a server's",
    "nvidia-cudnn-frontend": "FlashInfer's",
    "nvidia-cutlass-dsl": "kernels for GPUs newer than 9.0, MoE and quantised models",
    "nvtx": "profiling",
    "pynvvideocodec": "videos",
    "quack-kernels": "with nvidia-cutlass-dsl",
    "tilelang": "kernels of other models",
    "tokenspeed-mla": "kernels of other models",
    "torchaudio": "audio",
    "torchcodec": "videos",
}
# Files of vLLM's wheel that a GPU of compute capability 9.0 does not need for the zoo's models.
PRUNED: dict[str, str] = {
    "vllm/vllm-rs": "the Rust frontend",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": "FlashAttention 2; 9.0 has 3",
    "vllm/_moe_C_stable_libtorch.abi3.so": "mixtures of experts",
    "vllm/third_party/deep_gemm/_C_extension.abi3.so": "fp8",
}


class CannotHave(Exception):
    """A requirement that can't be met; the message is pip's own."""


def download(requirements: Iterable[str], facts: Mapping[str, Any], instead: Iterable[str], folder: Path) -> list[Path]:
    """The wheels that a machine lacks for these requirements, in `folder`. Raises: CannotHave.

    `facts` is what `ship look` said there. A requirement in `instead` holds for its name, whatever others ask.
    """
    there = {canonicalize_name(name): version for name, version in facts["packages"].items()}
    fixed = {canonicalize_name(one.name): one.specifier for one in map(Requirement, instead)}
    wheels: dict[str, Path] = {}
    wanted: dict[str, SpecifierSet] = {}
    extras: dict[str, set[str]] = {}
    level = [Requirement(line) for line in requirements]
    while level:
        fresh = []
        for one in level:
            name = canonicalize_name(one.name)
            wanted[name] = fixed.get(name, wanted.get(name, SpecifierSet()) & one.specifier)
            is_new = not one.extras <= extras.setdefault(name, set())
            extras[name] |= one.extras
            if name in there and wanted[name].contains(there[name], prereleases=True):
                continue
            if name not in wheels or not fits(wheels[name], wanted[name]) or is_new:
                fresh.append(name)
        names = sorted(set(fresh) - {name for name in wheels if fits(wheels[name], wanted[name])})
        wheels |= fetch([f"{name}{wanted[name]}" for name in names], facts, folder)
        level = [needed for name in set(fresh) for needed in needs(wheels[name], extras[name], facts)]
    return [wheels[name] for name in sorted(wheels)]


def fetch(requirements: list[str], facts: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Download wheels without their dependencies; by name."""
    if not requirements:
        return {}
    into = folder / f"level-{len(list(folder.glob('*')))}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), *target(facts)]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise CannotHave("\n".join(errors) or done.stderr[-1000:])
    return {str(parse_wheel_filename(path.name)[0]): path for path in into.glob("*.whl")}


def target(facts: Mapping[str, Any]) -> list[str]:
    """pip's options for wheels of the machine: its Python, and each glibc up to its own."""
    machine, minor = facts["machine"], facts["libc"][1]
    old = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}
    platforms = [f"manylinux_2_{glibc}_{machine}" for glibc in range(minor, 4, -1)]
    platforms += [f"{name}_{machine}" for glibc, name in old.items() if glibc <= minor] + [f"linux_{machine}"]
    options = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", facts["python"]]
    return options + [option for one in platforms for option in ("--platform", one)]


def fits(wheel: Path, wanted: SpecifierSet) -> bool:
    return wanted.contains(parse_wheel_filename(wheel.name)[1], prereleases=True)


def needs(wheel: Path, extras: Iterable[str], facts: Mapping[str, Any]) -> list[Requirement]:
    """What a wheel requires on the machine, less what is left out."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        lines = HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    environment = {**default_environment(), "python_version": facts["python"], "platform_machine": facts["machine"]}
    environment |= {"python_full_version": f"{facts['python']}.0"}
    return [
        one
        for one in map(Requirement, lines)
        if canonicalize_name(one.name) not in LEFT_OUT
        and (one.marker is None or any(one.marker.evaluate({**environment, "extra": extra}) for extra in ["", *extras]))
    ]


def install(wheels: list[Path], facts: Mapping[str, Any], folder: Path) -> None:
    """Unpack wheels into a folder for PYTHONPATH, as pip does it for the machine's Python."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    command += ["--target", str(folder), *target(facts), *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotHave(done.stderr[-1000:])


def prune(folder: Path) -> dict[str, str]:
    """Remove the files that the checks don't need; returns them with the reason."""
    gone = {name: why for name, why in PRUNED.items() if (folder / name).is_file()}
    for name in gone:
        (folder / name).unlink()
    return gone
