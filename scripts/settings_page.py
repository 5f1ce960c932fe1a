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

Every setting, its default, and what it does. Set the variable `{PREFIX}<NAME>`, or
`--additional-config '{{"{CONFIG_KEY}": {{"name": value}}}}'`, which wins; engines and workers get it, also on other
machines. `mmcache doctor --settings` shows all.

A wrong value, two settings that contradict each other, and an unknown name in `--additional-config` stop the start.
A variable `{PREFIX}*` that is no setting does not stop it: it has no effect, is one line in the log with the name
that may have been meant, and a finding of `mmcache doctor`. So a misspelt name of a setting that protects, such as
`{PREFIX}REQUIRE_SALTS=1`, protects nothing; that line is an error. Run `mmcache doctor` after each change of variables.

A component that is unset is on where it is [proven](limits.md#where-a-component-is-on). Write sizes as `512MiB`.

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
