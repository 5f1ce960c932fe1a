# SPDX-License-Identifier: Apache-2.0
"""What engines have counted, as the API server takes it out of vLLM's statistics."""

from prometheus_client import REGISTRY
from vllm.v1.metrics.stats import SchedulerStats

from vllm_mmcache.metrics import hooks, transport


def test_tables_that_come_with_statistics_are_those_of_the_engine_that_sent_them() -> None:
    """By the hook on vLLM's own statistics, from two engines of one deployment."""

    def record(scheduler_stats: SchedulerStats, engine_idx: int) -> None:
        assert scheduler_stats.ec_connector_stats is None

    for engine, size in ((1, 5), (2, 6)):
        stats = SchedulerStats(ec_connector_stats={transport.KEY: {"size/of two/bytes": size}})
        hooks.receive(record, None, (), {"scheduler_stats": stats, "engine_idx": engine})
    labels = [{"table": "of two", "engine": str(engine)} for engine in (1, 2)]
    assert [REGISTRY.get_sample_value("mmcache:engine_table_bytes", one) for one in labels] == [5, 6]
