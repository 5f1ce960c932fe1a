# SPDX-License-Identifier: Apache-2.0
"""The main function of the process of one item: its task comes as JSON on stdin, and what it found goes to stdout."""

import json
import sys
from collections.abc import Callable
from typing import Any


def run_task(check: Callable[..., dict[str, Any]]) -> None:
    """Call `check` with the task's values by name; its result is the last line of stdout."""
    if not __debug__:
        sys.exit("AssertionError: Python runs with -O, without which no check could fail: unset PYTHONOPTIMIZE")
    print(json.dumps(check(**json.load(sys.stdin))), flush=True)
