# SPDX-License-Identifier: Apache-2.0
"""The process of one item on a model of the zoo: an engine, its checks, and what they found.

python -m mmcache_tools.prove_zoo.worker, see vllm_mmcache/prove/tasks.py; vllm_mmcache/prove/items.py starts it.
"""

from mmcache_tools.prove_zoo import checks
from vllm_mmcache.prove.tasks import run_task

if __name__ == "__main__":
    run_task(checks.check)
