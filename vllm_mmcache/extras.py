# SPDX-License-Identifier: Apache-2.0
"""The command that adds extras to this installation, for messages: from where this package itself came.

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


def how(*extras: str) -> str:
    """The shell command, such as "pip install '/path/to/clone[cpu]'"."""
    wanted = f"[{','.join(extras)}]"
    try:
        # Sources on the path have metadata, too (egg-info), but nobody has installed those.
        found = next(one for one in metadata.distributions(name=NAME) if one.read_text("INSTALLER"))
        text = found.read_text("direct_url.json")
        return _install(wanted, json.loads(text) if text else None)
    except (StopIteration, OSError, ValueError, KeyError, TypeError, AttributeError):
        return _in_a_clone(wanted)


def _install(wanted: str, origin: dict[str, Any] | None) -> str:
    """`origin`: what direct_url.json says, None where an index brought the package. Raises: KeyError, TypeError."""
    if origin is None:
        return f"pip install {shlex.quote(NAME + wanted)}"
    if "dir_info" in origin:
        path = unquote(urlsplit(origin["url"]).path)
        if not Path(path, "pyproject.toml").is_file():
            return _in_a_clone(wanted)
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {editable}{shlex.quote(path + wanted)}"
    url = origin["url"]
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    return f"pip install {shlex.quote(f'{NAME}{wanted} @ {url}')}"


def _in_a_clone(wanted: str) -> str:
    return f"pip install {shlex.quote(f'.{wanted}')} in a clone of {NAME}"
