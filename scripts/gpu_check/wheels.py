# SPDX-License-Identifier: Apache-2.0
"""Which wheels another machine lacks for vLLM and the plugin, downloaded by pip for that machine's Python.

pip can't resolve for a machine that has packages already, and an index may lack what vLLM pins. So the requirements
are followed here one level at a time: what the machine has and fits is left there, the rest is downloaded without its
dependencies, and they come next.
"""

import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename

# Requirements of vLLM that the checks don't need: of servers, audio, videos, profiling, quantised and other models,
# loaders of weights, GPUs newer than 9.0, and kernels that nvcc has to compile.
LEFT_OUT = frozenset({
    "anthropic", "fastsafetensors", "flashinfer-python", "humming-kernels", "instanttensor", "mcp",
    "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "nvtx", "pynvvideocodec", "quack-kernels", "tilelang",
    "tokenspeed-mla", "torchaudio", "torchcodec",
})  # fmt: skip
# Files of vLLM's wheel that a GPU of compute capability 9.0 does not need for the zoo's models.
PRUNED: dict[str, str] = {
    "vllm/vllm-rs": "the Rust frontend",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": "FlashAttention 2; 9.0 has 3",
    "vllm/_moe_C_stable_libtorch.abi3.so": "mixtures of experts",
    "vllm/third_party/deep_gemm/_C_extension.abi3.so": "fp8",
}


Facts = Mapping[str, Any]  # what `ship look` says of a machine


class CannotHave(Exception):
    """A requirement that can't be met; the message is pip's own."""


def download(requirements: Iterable[str], facts: Facts, instead: Iterable[str], folder: Path) -> list[Path]:
    """The wheels that a machine lacks for these requirements, in `folder`. Raises: CannotHave.

    A requirement in `instead` holds for its name, whatever others ask.
    """
    there = {canonicalize_name(name): version for name, version in facts["packages"].items()}
    fixed = {canonicalize_name(one.name): one.specifier for one in map(Requirement, instead)}
    wheels: dict[str, Path] = {}
    asked, known = set(map(Requirement, requirements)), set[Requirement]()
    while asked != known:
        wanted: dict[str, SpecifierSet] = {}
        extras: dict[str, set[str]] = {}
        for one in asked:
            name = canonicalize_name(one.name)
            wanted[name] = fixed.get(name, wanted.get(name, SpecifierSet()) & one.specifier)
            extras[name] = extras.get(name, set()) | one.extras
        has = there | {name: str(parse_wheel_filename(path.name)[1]) for name, path in wheels.items()}
        fits = {name for name in wanted.keys() & has.keys() if wanted[name].contains(has[name], prereleases=True)}
        if lacking := [f"{name}{wanted[name]}" for name in sorted(wanted.keys() - fits)]:
            into = folder / f"level-{len(list(folder.glob('*')))}"
            pip("download", facts, "--dest", str(into), *lacking)
            wheels |= {str(parse_wheel_filename(path.name)[0]): path for path in into.glob("*.whl")}
        known = asked
        asked = asked.union(*(needs(path, extras[name], facts) for name, path in wheels.items()))
    return [wheels[name] for name in sorted(wheels)]


def install(wheels: Iterable[Path], facts: Facts, folder: Path) -> None:
    """Unpack wheels into a folder for PYTHONPATH, as pip does it for the machine's Python. Raises: CannotHave."""
    pip("install", facts, "--no-index", "--no-compile", "--target", str(folder), *map(str, wheels))


def pip(command: str, facts: Facts, *arguments: str) -> None:
    """Run pip for wheels, without their dependencies, of the machine's Python and each glibc up to its own."""
    machine, minor = facts["machine"], facts["libc"][1]
    tags = [*(f"manylinux_2_{glibc}" for glibc in range(minor, 4, -1)), "manylinux2014", "linux"]
    target = ["--implementation=cp", f"--python-version={facts['python']}"]
    target += [f"--platform={tag}_{machine}" for tag in tags]
    options = [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", "--only-binary=:all:", *target]
    done = subprocess.run([*options, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise CannotHave("\n".join(errors) or done.stderr[-1000:])


def needs(wheel: Path, extras: Iterable[str], facts: Facts) -> list[Requirement]:
    """What a wheel requires on the machine, less what is left out."""
    (info,) = [path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info")]
    environment = {**default_environment(), "python_version": facts["python"], "platform_machine": facts["machine"]}
    environment |= {"python_full_version": f"{facts['python']}.0"}
    return [
        one
        for one in map(Requirement, PathDistribution(info).requires or ())
        if canonicalize_name(one.name) not in LEFT_OUT
        and (one.marker is None or any(one.marker.evaluate({**environment, "extra": extra}) for extra in ["", *extras]))
    ]


def prune(folder: Path) -> dict[str, str]:
    """Remove the files that the checks don't need; returns them with the reason."""
    gone = {name: why for name, why in PRUNED.items() if (folder / name).is_file()}
    for name in gone:
        (folder / name).unlink()
    return gone
