# SPDX-License-Identifier: Apache-2.0
"""A server ends, whatever its place of files does."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process


def test_a_process_ends_while_a_place_hangs() -> None:
    """The interpreter waits for no thread of a place."""
    work = """
import contextlib, time
from vllm_mmcache.files.access import Access
with contextlib.suppress(Exception):
    Access("reading", 0.1).wait_for(lambda: time.sleep(600))
print("ended")
"""
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "ended\n"
