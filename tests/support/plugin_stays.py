# SPDX-License-Identifier: Apache-2.0
"""The guard of the plugin: a file of tests that takes it out of their process fails.

vLLM asks for its plugins once in a process, so later engines there would run without it, and other tests fail.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_mmcache.hooking import installer
from vllm_mmcache.lifecycle.registry import FIRST


@contextmanager
def plugin_stays() -> Iterator[None]:
    """A block at whose end the hooks that see the VllmConfig are installed, if they were at its start.

    Raises: AssertionError
    """
    was_there = FIRST.name in installer._installed
    yield
    is_there = FIRST.name in installer._installed
    assert is_there or not was_there, "a test has undone the plugin's first hooks: undo what it has installed alone"
