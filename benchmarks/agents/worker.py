# SPDX-License-Identifier: Apache-2.0
"""One side's requests of agents and pipelines, in a process of its own."""

import time
from typing import Any

from benchmarks.agents.workloads import WORKLOADS, reuse, run
from benchmarks.gallery.worker import TowerRuns
from vllm_mmcache.prove.engines import EngineConfig, EnginePool, Rig
from vllm_mmcache.prove.tasks import run_task


def workloads(pool: EnginePool, family: str, names: list[str]) -> dict[str, Any]:
    """By workload, on one engine with vLLM's own defaults that forgets everything before each."""
    rig = pool.get(EngineConfig(family, block_tokens=None, batched_tokens=None, max_tokens=9216, num_images=8))
    runs = TowerRuns(rig)
    return {name: workload(rig, runs, name) for name in names}


def workload(rig: Rig, runs: TowerRuns, name: str) -> dict[str, Any]:
    """Tokens, runs of the vision tower and seconds of each request, from cold."""
    rig.make_cold()
    runs.images = 0
    answers, seconds = [], []
    start = time.perf_counter()
    for salted_answer in run(rig, WORKLOADS[name]()):
        seconds.append(time.perf_counter() - start)
        answers.append(salted_answer)
        start = time.perf_counter()
    texts = [list(answer.token_ids) for _, answer in answers]
    return {**reuse(rig, answers), "tower_runs": runs.images, "seconds": seconds, "token_ids": texts}


if __name__ == "__main__":
    run_task({"workloads": workloads})
