# SPDX-License-Identifier: Apache-2.0
"""The process of one item on the user's own model: an engine, its checks, and what they found.

python -m vllm_mmcache.prove.worker, see tasks.py; items.py starts it.
"""

from vllm_mmcache.prove import own_checks
from vllm_mmcache.prove.tasks import run_task

if __name__ == "__main__":
    run_task(own_checks.check)
