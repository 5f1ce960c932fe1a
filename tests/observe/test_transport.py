# SPDX-License-Identifier: Apache-2.0
"""What the engine counts arrives with the scheduler's statistics, once, and vLLM's own statistics stay as they are."""

import prometheus_client
import pytest

from vllm_mmcache import events
from vllm_mmcache.prove.engines import EngineConfig, EnginePool
from vllm_mmcache.prove.scenarios import filler, one, picture, user

pytestmark = pytest.mark.engine


def shown(name: str) -> float:
    return prometheus_client.REGISTRY.get_sample_value(f"mmcache:{name}_total") or 0.0


def test_engine_counters_arrive(pool: EnginePool) -> None:
    rig = pool.get(EngineConfig("gemma3"))
    counters = events.ENGINE_COUNTERS.values()
    one(rig, user("Hello"))  # whatever was counted before arrives
    before = {counter.name: (counter.value, shown(counter.name)) for counter in counters}
    for question in ("What is it?", "And what else is it?"):
        one(rig, user(filler(150), picture(90), question + filler(100)))
    grown = {c.name: (c.value - before[c.name][0], shown(c.name) - before[c.name][1]) for c in counters}
    assert grown["checkpoints_made"][0] == 2, "the picture's start and end"
    assert grown["checkpoints_used"][0] == 1
    assert all(seen == pytest.approx(counted, abs=1e-4) for counted, seen in grown.values())
