# SPDX-License-Identifier: Apache-2.0
"""The module that names distributions is cheap to import, in a process of its own."""

import subprocess
import sys

import pytest


@pytest.mark.process
def test_it_is_cheap() -> None:
    code = (
        "import sys, vllm_mmcache.base.distributions; print({'typer', 'vllm', 'torch', 'pydantic'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
