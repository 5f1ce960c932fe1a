# SPDX-License-Identifier: Apache-2.0
"""What is there to check: interpreter, vLLM, platform, device and model runners. Refuses where nothing can be checked.

Needs nothing but the standard library until it knows that vLLM is there.
"""

import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mmcache_tools.prove_zoo.items import SWITCH

from benchmarks.results import processor
from vllm_mmcache import __version__
from vllm_mmcache.base.errors import EnvironmentProblem
from vllm_mmcache.base.versions import installed
from vllm_mmcache.prove.look import see

REPO = Path(__file__).parents[2]
TOOLS = REPO / "tools"


@dataclass(frozen=True)
class Found:
    """What the checks run on."""

    machine: str
    """The GPU's name, or the processor's."""
    platform: str
    vllm: str
    torch: str
    python: str
    runners: tuple[str, ...]
    """Of vLLM's model runners those that can be checked; first the one that vLLM takes by itself on a GPU."""


def project() -> dict[str, Any]:
    """The project table of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    return table


def make_plugin_path(folder: Path) -> str:
    """A PYTHONPATH on which this checkout is an installed plugin; nothing is installed into the interpreter.

    `folder` gets the metadata that pip would write: vLLM finds plugins by their entry points. It comes first, so it
    also wins over another vllm-mmcache that is installed.
    """
    info = folder / f"vllm_mmcache-{__version__}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-mmcache\nVersion: {__version__}\n")
    with (info / "entry_points.txt").open("w") as file:
        for group, entries in project()["entry-points"].items():
            print(f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()), sep="\n", file=file)
    return os.pathsep.join(map(str, [folder, REPO, TOOLS, *filter(None, [os.environ.get("PYTHONPATH")])]))


def look(wanted: str) -> Found:
    """What is here, where it is of the wanted platform. Raises: EnvironmentProblem: what was seen, and what to do."""
    if find_spec("vllm") is None:
        raise EnvironmentProblem(f"{sys.executable} has no vLLM. Name one that has it: make gpu-check VLLM_PYTHON=PATH")
    if missing := [line for line in project()["dependencies"] if not is_met(line)]:
        raise EnvironmentProblem(
            f"{sys.executable} lacks what the plugin needs beside vLLM. Install it: "
            f"{sys.executable} -m pip install {' '.join(map(repr, missing))}"
        )
    try:
        seen = see("", arguments=())
    except ImportError as error:
        raise EnvironmentProblem(f"vLLM can't be imported by {sys.executable}: {error!r}. Reinstall it.") from error
    if seen.platform != wanted:
        raise EnvironmentProblem(
            f"{sys.executable}: vLLM {seen.vllm} runs on {seen.platform!r} here, not on {wanted!r}; {seen_of_gpu()}. "
            "On an NVIDIA GPU, with the interpreter that has vLLM for CUDA: make gpu-check VLLM_PYTHON=/path/to/python."
            f" To try it on the CPU: make gpu-check VLLM_PYTHON={sys.executable} ARGS='--platform cpu'"
        )
    return Found(
        machine=processor() if seen.platform == "cpu" else seen.device,
        platform=seen.platform,
        vllm=seen.vllm,
        torch=installed("torch") or "",
        python=sys.version.split()[0],
        runners=("V1",) if why_no_v2(seen.platform) else ("V2", "V1"),
    )


def is_met(line: str) -> bool:
    """Whether this interpreter meets a requirement; packaging itself comes with vLLM."""
    from packaging.requirements import Requirement

    requirement = Requirement(line)
    version = installed(requirement.name)
    return version is not None and version in requirement.specifier


def why_no_v2(platform: str) -> str:
    """Why nothing can be checked on the second model runner; empty where it can."""
    import vllm.envs

    if SWITCH not in vllm.envs.environment_variables:
        return f"this vLLM has no {SWITCH}"
    if platform == "cpu" and find_spec("triton") is None:
        return f"{sys.executable} has no Triton, whose interpreter it needs on the CPU: pip install triton"
    return ""


def lacks_flashinfer(platform: str) -> bool:
    """Whether vLLM for CUDA is here without FlashInfer, which it takes for granted."""
    return platform == "cuda" and find_spec("flashinfer") is None


def seen_of_gpu() -> str:
    """What NVIDIA's own tool says: name, compute capability, driver and memory of each GPU, or what is wrong."""
    command = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "nvidia-smi is not there"
    return f"nvidia-smi says: {'; '.join((done.stdout or done.stderr).splitlines())[:200] or 'nothing'}"
