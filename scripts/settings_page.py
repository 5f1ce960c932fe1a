# SPDX-License-Identifier: Apache-2.0
"""Writes docs/settings.md from the settings model: `python scripts/settings_page.py`. A test compares the two."""

import textwrap
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from pydantic import ByteSize, SecretStr

from vllm_mmcache.durations import Duration
from vllm_mmcache.settings import CONFIG_KEY, ONLY_VARIABLES, PREFIX, Settings

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

HEAD = f"""# Settings

<!-- written by scripts/settings_page.py from vllm_mmcache/settings.py; change it there -->

Each setting is a variable `{PREFIX}<NAME>`, and a key of `--additional-config '{{"{CONFIG_KEY}": {{"name": value}}}}'`,
which wins. What was set travels with vLLM's configuration to every engine and worker, also on other machines. An
unknown name, a value that is not allowed, or two settings that contradict each other stop the start; the message says
what is allowed. `mmcache doctor --settings` shows them.

A room whose default is *unset* is on where this project's tests have run it, or `mmcache prove` has; elsewhere it is
off until its setting says true. Sizes may be written as `512MiB` or `10GiB`.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, field in Settings.model_fields.items():
        where = "variable only" if name in ONLY_VARIABLES else "variable or command line"
        parts.append(
            f"## `{name}`\n\n`{PREFIX}{name.upper()}` · {kind(field.annotation)} · default {default(field.default)} · "
            f"{where}\n\n{textwrap.fill(field.description or '', 120, break_on_hyphens=False)}\n"
        )
    return "\n".join(parts)


def kind(annotation: Any) -> str:
    """The type in words."""
    names = {
        bool: "true or false",
        int: "number",
        float: "number",
        str: "text",
        SecretStr: "text",
        ByteSize: "size in bytes",
        Duration: "length of time",
    }
    kinds = [names[part] for part in get_args(annotation) or (annotation,) if part is not NoneType]
    return " or ".join(kinds)


def default(value: Any) -> str:
    """The default as one would write it."""
    if value is None:
        return "unset"
    if isinstance(value, ByteSize):
        return value.human_readable().replace(".0", "")
    if isinstance(value, Duration):
        return value.words()
    return str(value).lower()


if __name__ == "__main__":
    PAGE.write_text(page())
