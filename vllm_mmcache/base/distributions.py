# SPDX-License-Identifier: Apache-2.0
"""What a server does not need of this package is a distribution of its own, vllm-mmcache-tools: is it here?

tools/pyproject.toml lists its files. Whatever else needs one of them asks here, and never imports it by name. An
editable installation of the repository has them all. Any process; standard library alone.
"""

import importlib
import importlib.util
from typing import Any

from vllm_mmcache.base import extras
from vllm_mmcache.base.errors import EnvironmentProblem

ZOO = "mmcache_tools.zoo"


def are_here(module: str = ZOO) -> bool:
    """Whether a module of the tools is installed. A folder that is left of it is not."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def load(module: str, what: str, also: str = "") -> Any:
    """A module of the tools. Raises: EnvironmentProblem where it is not installed: `what` needs it; `also` do this."""
    if not are_here(module):
        raise missing(what, also)
    return importlib.import_module(module)


def missing(what: str, also: str = "") -> EnvironmentProblem:
    """The error for `what`, which needs the tools: how they are installed, and what can be done in place of that."""
    return EnvironmentProblem(f"{what} needs {extras.TOOLS}, which is not installed: {extras.how_tools()}{also}")
