# SPDX-License-Identifier: Apache-2.0
"""What is installed of this repository's two distributions, and the shell command that installs more of them.

vllm-mmcache-tools (tools/pyproject.toml) has what a server does not need. Whatever needs a module of it asks here, and
never imports it by name; an editable installation of the repository has it. No index need have vllm-mmcache, so its
name alone would lead nowhere: commands name where this package itself came from. pip writes that down
(direct_url.json, PEP 610) unless it was an index. Any process; standard library alone.
"""

import importlib
import importlib.util
import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from vllm_mmcache.base.errors import EnvironmentProblem

NAME = "vllm-mmcache"
TOOLS = "vllm-mmcache-tools"
FOLDER = "tools"  # of the repository: where TOOLS is built

# Modules of the tools.
ZOO = "mmcache_tools.zoo"
PROVE_ZOO = "mmcache_tools.prove_zoo.items"


def are_here(module: str = ZOO) -> bool:
    """Whether a module of the tools is installed. A folder that is left of it is not."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # nor is the package that it is in
        return False
    return found is not None and found.origin is not None


def load(module: str, what: str, also: str = "") -> Any:
    """A module of the tools. Raises: EnvironmentProblem where it is not installed: `what` needs it; `also` do this."""
    if not are_here(module):
        raise missing(what, also)
    return importlib.import_module(module)


def missing(what: str, also: str = "") -> EnvironmentProblem:
    """The error for `what`, which needs the tools: how they are installed, and what can be done in place of that."""
    return EnvironmentProblem(f"{what} needs {TOOLS}, which is not installed: {tools_install_command()}{also}")


def install_command(*extras: str) -> str:
    """The shell command that installs extras of this package, such as "pip install '/path/to/clone[cpu]'"."""
    return _command(NAME, f"[{','.join(extras)}]", "")


def tools_install_command() -> str:
    """The shell command that installs the tools, such as "pip install /path/to/clone/tools"."""
    return _command(TOOLS, "", FOLDER)


def _command(name: str, extras: str, folder: str) -> str:
    try:
        # Sources on the path have metadata, too (egg-info), but nobody has installed those.
        found = next(one for one in metadata.distributions(name=NAME) if one.read_text("INSTALLER"))
        text = found.read_text("direct_url.json")
        return _from_origin(name, extras, folder, json.loads(text) if text else None)
    except (StopIteration, OSError, ValueError, KeyError, TypeError, AttributeError):
        return _in_a_clone(extras, folder)


def _from_origin(name: str, extras: str, folder: str, origin: dict[str, Any] | None) -> str:
    """`origin`: what direct_url.json says, None where an index brought the package. Raises: KeyError, TypeError."""
    if origin is None:
        return f"pip install {shlex.quote(name + extras)}"
    if "dir_info" in origin:
        path = Path(unquote(urlsplit(origin["url"]).path), folder)
        if not (path / "pyproject.toml").is_file():
            return _in_a_clone(extras, folder)
        editable = "-e " if extras and origin["dir_info"].get("editable") else ""
        return f"pip install {editable}{shlex.quote(f'{path}{extras}')}"
    url = origin["url"]
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    elif folder and url.endswith(".whl"):  # holds no other distribution
        return _in_a_clone(extras, folder)
    place = f"#subdirectory={folder}" if folder else ""
    return f"pip install {shlex.quote(f'{name}{extras} @ {url}{place}')}"


def _in_a_clone(extras: str, folder: str) -> str:
    where = f"./{folder}" if folder else "."
    return f"pip install {shlex.quote(where + extras)} in a clone of {NAME}"
