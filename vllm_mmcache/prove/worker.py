# SPDX-License-Identifier: Apache-2.0
"""The process of one item: an engine, its checks, and what they found as JSON in the last line of stdout.

python -m vllm_mmcache.prove.worker, with the item's task as JSON on stdin; items.py starts it.
"""

import sys

from vllm_mmcache.prove import checks, own_checks
from vllm_mmcache.prove.tasks import run_task

if __name__ == "__main__":
    if not __debug__:
        sys.exit("AssertionError: Python runs with -O, without which no check could fail: unset PYTHONOPTIMIZE")
    run_task({"check": checks.check, "own": own_checks.check})
