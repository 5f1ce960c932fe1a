# SPDX-License-Identifier: Apache-2.0
"""The command that adds extras or the tools to this installation, for messages: from where this package itself came.

No index need have vllm-mmcache, so its name alone would lead nowhere. pip writes down where a package came from
(direct_url.json, PEP 610) unless it was an index. Any process; standard library alone.
"""

import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

NAME = "vllm-mmcache"
TOOLS = "vllm-mmcache-tools"
FOLDER = "tools"  # of the repository: where TOOLS is built


def how(*extras: str) -> str:
    """The shell command, such as "pip install '/path/to/clone[cpu]'"."""
    return _said(NAME, f"[{','.join(extras)}]", "")


def how_tools() -> str:
    """The shell command that adds the tools (distributions.py), such as "pip install /path/to/clone/tools"."""
    return _said(TOOLS, "", FOLDER)


def _said(name: str, extras: str, folder: str) -> str:
    try:
        # Sources on the path have metadata, too (egg-info), but nobody has installed those.
        found = next(one for one in metadata.distributions(name=NAME) if one.read_text("INSTALLER"))
        text = found.read_text("direct_url.json")
        return _install(name, extras, folder, json.loads(text) if text else None)
    except (StopIteration, OSError, ValueError, KeyError, TypeError, AttributeError):
        return _in_a_clone(extras, folder)


def _install(name: str, extras: str, folder: str, origin: dict[str, Any] | None) -> str:
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
