# SPDX-License-Identifier: Apache-2.0
"""Features and records in a cluster of several nodes."""

from tests.features.conftest import TIMEOUT_S
from tests.features.packages import BUDGET_BYTES, features, identity, load, save
from tests.fleets.valkeys import Cluster
from vllm_mmcache import records
from vllm_mmcache.features.remote import PREFIX, RemoteTier
from vllm_mmcache.records.remote import RemotePlace

NUMBERS = range(24)
KEYS = [records.key("test", str(number)) for number in NUMBERS]


def tier_at(url: str, timeout_s: float = TIMEOUT_S, rest_s: float = 5.0) -> RemoteTier:
    return RemoteTier(url, ttl_s=100, max_bytes=BUDGET_BYTES, timeout_s=timeout_s, rest_s=rest_s)


def place_at(url: str) -> RemotePlace:
    return RemotePlace(url, ttl_s=100, timeout_s=TIMEOUT_S)


def test_features_are_kept_on_all_nodes(cluster: Cluster) -> None:
    tier = tier_at(cluster.url)
    assert [save(tier, number) for number in NUMBERS] == [True] * len(NUMBERS)
    assert cluster.names() == {PREFIX + identity(number).key for number in NUMBERS}
    assert all(server.client.dbsize() for server in cluster.primaries)
    replica = tier_at(cluster.url)
    assert [load(replica, number) for number in NUMBERS] == [bytes(features(number)) for number in NUMBERS]
    assert load(replica, "another") is None
    for one in (tier, replica):
        assert one.counters.snapshot()["errors"] == 0


def test_records_are_kept_on_all_nodes(cluster: Cluster) -> None:
    place = place_at(cluster.url)
    place.save({key: b"value " + key for key in KEYS})
    assert len(cluster.names()) == len(KEYS)
    replica = place_at(cluster.url)
    for key in KEYS:
        assert (entry := replica.get(key)) is not None
        assert entry.value == b"value " + key
    assert (place.counts.snapshot()["saved"], place.counts.snapshot()["errors"]) == (len(KEYS), 0)
    assert replica.counts.snapshot()["errors"] == 0
