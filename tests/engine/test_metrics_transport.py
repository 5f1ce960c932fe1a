# SPDX-License-Identifier: Apache-2.0
"""What the engine counts arrives with the scheduler's statistics, once, and vLLM's own statistics stay as they are."""

import prometheus_client
import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool

from vllm_mmcache.exactness.conversations import filler, one, picture, user
from vllm_mmcache.metrics import counters, table_sizes

pytestmark = pytest.mark.engine


def shown(name: str) -> float:
    return prometheus_client.REGISTRY.get_sample_value(f"mmcache:{name}_total") or 0.0


def test_engine_counters_arrive(pool: EnginePool) -> None:
    rig = pool.get(EngineConfig("gemma3"))
    of_engine = counters.ENGINE_COUNTERS.values()
    one(rig, user("Hello"))  # whatever was counted before arrives
    before = {counter.name: (counter.value, shown(counter.name)) for counter in of_engine}
    for question in ("What is it?", "And what else is it?"):
        one(rig, user(filler(150), picture(90), question + filler(100)))
    grown = {c.name: (c.value - before[c.name][0], shown(c.name) - before[c.name][1]) for c in of_engine}
    assert grown["checkpoints_made"][0] == 2, "the picture's start and end"
    assert grown["checkpoints_used"][0] == 1
    assert all(seen == pytest.approx(counted, abs=1e-4) for counted, seen in grown.values())


def test_sizes_of_the_engine_arrive(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes_shown(table: str, what: str) -> float | None:
        labels = {"table": table, "engine": "0"}
        return prometheus_client.REGISTRY.get_sample_value(f"mmcache:engine_table_{what}", labels)

    rig = pool.get(EngineConfig("gemma3"))
    monkeypatch.setattr(table_sizes, "ENGINE_SECONDS", 0.0)
    monkeypatch.setattr(table_sizes, "_sent", {})
    one(rig, user(filler(150), picture(91), "What is it?" + filler(100)))
    one(rig, user("Hello"))  # what changed with the last step comes with the next one
    now = dict(table_sizes._look(table_sizes._engine))
    assert {"checkpoints", "features_ram"} <= set(now)
    assert sizes_shown("checkpoints", "entries") == now["checkpoints"].entries
    assert (now["checkpoints"].entries or 0) >= 2, "the picture's start and end"
    assert sizes_shown("features_ram", "budget_bytes") == now["features_ram"].budget_bytes
    assert (sizes_shown("features_ram", "bytes") or 0) > 0
