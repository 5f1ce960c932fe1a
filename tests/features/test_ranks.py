# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks, each with a store of its own: features are used only where both have them.

Were one rank to run its tower alone, its layers would wait for the other for ever.
"""

from typing import Any

import pytest

from vllm_mmcache.prove.engines import EngineConfig, EnginePool
from vllm_mmcache.prove.expect import assert_exact
from vllm_mmcache.prove.scenarios import filler, one, picture, user

pytestmark = pytest.mark.engine

CONFIG = EngineConfig("qwen3-vl", more=(("tensor_parallel_size", 2), ("distributed_executor_backend", "mp")))


def runs_of(worker: Any) -> tuple[int, int]:
    """In a worker process: images that its tower ran for, and packages that its RAM tier found."""
    from vllm_mmcache import events
    from vllm_mmcache.features.vllm_side import counts

    return int(events.totals()["tower_images"]), int(counts()["ram"]["hits"])


def lose(worker: Any) -> None:
    """In a worker process: the second rank's packages are evicted."""
    if worker.rank == 1:
        worker.model_runner._mmcache_features.store.ram.clear()


def test_ranks_agree(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions go to the workers
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # vLLM would bind each rank to a NUMA node of its own
    pool.close()
    rig = pool.get(CONFIG)
    try:
        ask = user(filler(40), picture(700), "What is it?")
        answers = [one(rig, ask)]
        (start, _), _ = rig.llm.collective_rpc(runs_of)
        rig.forget_all_but_features()
        answers.append(one(rig, ask))
        assert rig.llm.collective_rpc(runs_of) == [(start, 1), (start, 1)]
        rig.llm.collective_rpc(lose)
        rig.forget_all_but_features()
        answers.append(one(rig, ask))
        assert rig.llm.collective_rpc(runs_of) == [(start + 1, 2), (start + 1, 1)]
        assert_exact(rig, answers)
    finally:
        pool.close()
