# SPDX-License-Identifier: Apache-2.0
"""One side's measurements of repeated questions about images, in a process of its own."""

import time
from typing import Any

from benchmarks.image_questions.workloads import SHAPES, WORKLOADS, unique
from vllm_mmcache.metrics import counters
from vllm_mmcache.prove.engines import EngineConfig, EnginePool
from vllm_mmcache.prove.tasks import run_task
from vllm_mmcache.prove.workloads import reuse, run


def workloads(pool: EnginePool, family: str) -> dict[str, Any]:
    """Cached and best possible tokens of each workload, each on a cold engine."""
    rig = pool.get(default(family))
    found: dict[str, Any] = {}
    for name, make in WORKLOADS.items():
        rig.make_cold()
        before = counters.totals()
        start = time.perf_counter()
        answers = run(rig, make(SHAPES[family]))
        seconds = time.perf_counter() - start
        found[name] = {
            **reuse(rig, answers),
            "requests": len(answers),
            "seconds": round(seconds, 2),
            "counters": counted(before),
        }
    return {"block_tokens": rig.block_tokens, "workloads": found}


def unique_pictures(pool: EnginePool, family: str, requests: int) -> dict[str, Any]:
    """Hit tokens where every picture is unique, with a KV cache of a tenth of the working set."""
    shape = SHAPES[family]
    rig = pool.get(default(family))
    (_, answer), *_ = run(rig, unique(shape, 1))
    groups = len(rig.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.coordinator.single_type_managers)
    blocks = requests * groups * -(-len(answer.prompt_ids) // rig.block_tokens) // 10
    rig = pool.get(default(family, num_blocks=blocks))
    before = counters.totals()
    found = reuse(rig, run(rig, unique(shape, requests)))
    return {**found, "kv_blocks": blocks, "groups": groups, "counters": counted(before)}


def default(family: str, num_blocks: int | None = None) -> EngineConfig:
    """vLLM's own block size and token budget."""
    return EngineConfig(
        family, block_tokens=None, batched_tokens=None, max_tokens=9216, num_blocks=num_blocks, num_images=10
    )


def counted(before: dict[str, float]) -> dict[str, float]:
    """What was counted since `before`."""
    return {name: n - before[name] for name, n in counters.totals().items() if n != before[name]}


if __name__ == "__main__":
    run_task({"workloads": workloads, "unique": unique_pictures})
