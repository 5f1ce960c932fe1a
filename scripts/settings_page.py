# SPDX-License-Identifier: Apache-2.0
"""Writes docs/settings.md from the settings model: `python scripts/settings_page.py`. A test compares the two."""

from pathlib import Path
from typing import Any

from annotated_types import Le
from pydantic import ByteSize
from pydantic.fields import FieldInfo

from vllm_mmcache.base.durations import Duration
from vllm_mmcache.base.settings import CONFIG_KEY, PREFIX, Settings

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

HEAD = f"""# Settings

<!-- written by scripts/settings_page.py from vllm_mmcache/base/settings.py; change it there -->

For whoever configures a server with the plugin: every setting, its default, and what it does.

Set the variable `{PREFIX}<NAME>`, with the name of the setting in capitals, or pass
`--additional-config '{{"{CONFIG_KEY}": {{"name": value}}}}'` to vLLM. If both are given, `--additional-config` wins.
The settings of the API server travel to its engines and workers, also to those on other machines. `mmcache doctor
--settings` prints every setting with the value that it has here.

A size is a number of bytes, or a number with a unit, such as `512MiB`. A *component* is a part of the plugin that has a
switch of its own among these settings. A component whose switch is unset is on where it is
[proven](limits.md#where-a-component-is-on). Other terms are in the [glossary](architecture.md#words).

## When a setting is wrong

The server does not start if a value is not allowed, if two settings contradict each other, or if
`--additional-config` has a name that is no setting.

A variable `{PREFIX}*` that is no setting does not stop the start. It has no effect. The log then has a line with the
name that may have been meant, and `mmcache doctor` has a finding. A misspelt name of a setting that protects tenants or
secrets, such as `{PREFIX}REQUIRE_SALTS=1`, therefore protects nothing, and its line in the log is an error. Run
`mmcache doctor` after each change of variables.

Settings that have been renamed are under [older names](upgrade.md#older-names).

## All settings

setting | default | what it does
---|---|---
"""


def page() -> str:
    """The whole page."""
    rows = (f"`{name}` | {default(field)} | {field.description}\n" for name, field in Settings.model_fields.items())
    return HEAD + "".join(rows)


def default(field: FieldInfo) -> str:
    """The default as one would write it, and the largest number that is allowed."""
    most = [f" (≤{bound.le})" for bound in field.metadata if isinstance(bound, Le)]
    return "".join([words(field.default), *most])


def words(value: Any) -> str:
    """A value as one would write it."""
    if value is None:
        return "unset"
    if isinstance(value, ByteSize):
        return value.human_readable().replace(".0", "")
    if isinstance(value, Duration):
        return value.words()
    return str(value).lower()


if __name__ == "__main__":
    PAGE.write_text(page())
