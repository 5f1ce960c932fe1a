# SPDX-License-Identifier: Apache-2.0
"""Features and records in a cluster of several nodes."""

import json
import os
import signal
import time

import pytest
from redis.crc import key_slot

from tests.support.packages import LARGE, features, identity, load, packed, save
from tests.support.redis_faults import after_piece, remote_tier
from tests.support.store_server import TIMEOUT_S, Server
from tests.support.tiers import LONG_S, within
from tests.support.valkeys import Cluster, info
from tests.system.cli.test_commands import mmcache
from tests.system.fleets.conftest import MakeCluster
from tests.system.fleets.load import NUM_PACKAGES, Load
from vllm_mmcache.components.features.tiers import FEATURES
from vllm_mmcache.storage.frame import key
from vllm_mmcache.storage.record_store import RECORDS
from vllm_mmcache.storage.tier import Tier

NUMBERS = range(24)
KEYS = [key("test", str(number)) for number in NUMBERS]
PREFIX = FEATURES.remote_prefix


def tier_at(url: str, timeout_s: float = TIMEOUT_S, rest_s: float = 5.0) -> Tier:
    return remote_tier(url, timeout_s=timeout_s, rest_s=rest_s)


def records_at(url: str) -> Tier:
    return remote_tier(url, RECORDS, TIMEOUT_S)


def test_features_are_kept_on_all_nodes(cluster: Cluster) -> None:
    tier = tier_at(cluster.url)
    assert [save(tier, number) for number in NUMBERS] == [True] * len(NUMBERS)
    assert cluster.names() == {PREFIX + identity(number).key for number in NUMBERS}
    assert all(server.client.dbsize() for server in cluster.primaries)
    replica = tier_at(cluster.url)
    assert [load(replica, number) for number in NUMBERS] == [bytes(features(number)) for number in NUMBERS]
    assert load(replica, "another") is None
    for one in (tier, replica):
        assert one.counts.snapshot()["errors"] == 0


def test_records_are_kept_on_all_nodes(cluster: Cluster) -> None:
    records = records_at(cluster.url)
    for _ in range(2):  # the first time it learns from each node that says where else
        records.put_many({one: b"value " + one for one in KEYS})
    assert len(cluster.names()) == len(KEYS)
    assert all(server.client.dbsize() for server in cluster.primaries)
    assert len(records.backend.groups(KEYS)) == len(cluster.primaries)
    replica = records_at(cluster.url)
    for one in KEYS:
        assert (found := replica.get(one, bytes)) is not None
        assert found[1] == b"value " + one
    assert (records.counts.snapshot()["saved"], records.counts.snapshot()["errors"]) == (2 * len(KEYS), 0)
    assert replica.counts.snapshot()["errors"] == 0


def name_on(server: Server, cluster: Cluster) -> int:
    """A number whose package is this node's."""
    return next(number for number in range(1000) if cluster.primary_of(PREFIX + identity(number).key) is server)


def test_a_failover_under_load(make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    """Of three primaries one is killed, and its replica takes its place: no load is wrong, and none waits for it."""
    cluster = make_cluster(3, 1)
    tier = tier_at(cluster.url, timeout_s=0.5)
    with Load(tier) as loads:
        assert within(LONG_S, lambda: loads.hits > 300)
        victim = cluster.primary_of(PREFIX + identity(0).key)
        killed = time.monotonic()
        victim.kill()
        assert within(LONG_S, cluster.is_whole)
        whole = time.monotonic()
        assert within(LONG_S, lambda: all(load(tier, number) is not None for number in range(NUM_PACKAGES)))
        found = time.monotonic()
        hits = loads.hits
        assert within(LONG_S, lambda: loads.hits > hits + 300)
    print(f"\ncluster, failover {whole - killed:.1f} s: {loads.said(killed, found - killed)}")
    assert loads.wrong == 0
    assert loads.longest_s < 1.5  # who is refused does not wait; the timeout is 0.5 s
    assert found - whole < 10
    assert not any("can't ask who has which slots" in line for line in caplog.messages)


def test_a_planned_failover_under_load(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2, 1)
    tier = tier_at(cluster.url, timeout_s=0.5)
    with Load(tier) as loads:
        assert within(LONG_S, lambda: loads.hits > 300)
        begun = time.monotonic()
        cluster.replicas[0].client.execute_command("CLUSTER FAILOVER")
        assert within(LONG_S, lambda: info(cluster.replicas[0], "info replication")["role"] == "master")
        assert within(LONG_S, lambda: all(load(tier, number) is not None for number in range(NUM_PACKAGES)))
        found = time.monotonic()
        hits = loads.hits
        assert within(LONG_S, lambda: loads.hits > hits + 300)
    print(f"\ncluster, planned failover: {loads.said(begun, found - begun)}")
    assert loads.wrong == 0
    assert loads.longest_s < 1.5


def test_a_dead_node_without_a_replica_costs_its_own_entries_alone(
    make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = make_cluster(3, 0)
    for server in cluster.nodes:
        server.client.config_set("cluster-require-full-coverage", "no")
    tier = tier_at(cluster.url)
    dead, *alive = cluster.primaries[::-1]
    lost, *kept = (name_on(server, cluster) for server in (dead, *alive))
    for number in (lost, *kept):
        assert save(tier, number)
    dead.kill()
    caplog.clear()
    asked = 0
    until = time.monotonic() + 4
    while time.monotonic() < until:
        assert load(tier, lost) is None
        save(tier, lost)
        assert [load(tier, number) for number in kept] == [bytes(features(number)) for number in kept]
        asked += 1
    counts = tier.counts.snapshot()
    assert asked > 30
    assert counts["errors"] < 10 < counts["dropped"]  # it is tried now and then
    assert not tier.is_open()
    assert len(caplog.messages) == 2, caplog.messages  # reading, writing
    assert all(f"node 127.0.0.1:{dead.port} is off" in line for line in caplog.messages)


def test_a_dead_node_costs_its_own_records_alone(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2, 0)
    for server in cluster.nodes:
        server.client.config_set("cluster-require-full-coverage", "no")
    records = records_at(cluster.url)
    for _ in range(2):
        records.put_many(dict.fromkeys(KEYS, b"value"))
    assert all(records.get(one, bytes) for one in KEYS)
    cluster.primaries[1].kill()
    names = cluster.names()
    there = [one for one in KEYS if RECORDS.remote_prefix + one.hex() in names]
    before = records.counts.snapshot()
    records.put_many(dict.fromkeys(KEYS, b"another"))
    for _ in range(3):
        assert [found and found[1] for found in (records.get(one, bytes) for one in there)] == [b"another"] * len(there)
        assert not any(records.get(one, bytes) for one in KEYS if one not in there)
    assert not records.is_open()
    after = {name: count - before[name] for name, count in records.counts.snapshot().items()}
    assert (after["saved"], after["dropped"]) == (len(there), len(KEYS) - len(there))
    assert 0 < after["dropped"] < len(KEYS)


def test_a_slot_that_moves(make_cluster: MakeCluster) -> None:
    """While it moves, its entry is a miss, and no failure; then it is found where it is."""
    cluster = make_cluster(2, 0)
    tier = tier_at(cluster.url)
    name = PREFIX + identity(0).key
    save(tier, 0)
    source = cluster.primary_of(name)
    (target,) = (server for server in cluster.primaries if server is not source)
    slot = key_slot(name.encode())
    ids = {server: server.client.execute_command("CLUSTER MYID").decode() for server in cluster.primaries}
    target.client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[source])
    source.client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[target])
    assert load(tier, 0) == features(0)  # it has not left yet
    source.client.execute_command("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)
    assert load(tier, 0) is None
    assert not save(tier, 0)
    assert not tier.is_open()
    for server in (target, source):
        server.client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[target])
    assert load(tier, 0) == features(0)
    assert save(tier, 0)
    other = name_on(source, cluster)
    assert save(tier, other)
    assert load(tier, other) == features(other)


def test_a_slot_that_moves_between_pieces_of_a_write(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing half is kept: the parts come once, so the whole is given up."""
    tier = tier_at(cluster.url)
    save(tier, 1)  # so that it knows the cluster
    name = PREFIX + identity(0).key
    source = cluster.primary_of(name)
    target = next(server for server in cluster.primaries if server is not source)
    slot = key_slot(name.encode())
    target_id = target.client.execute_command("CLUSTER MYID").decode()

    def move(to: str) -> None:
        source.client.flushall()
        for server in (target, source):
            server.client.execute_command("CLUSTER SETSLOT", slot, "NODE", to)

    with monkeypatch.context() as patch:
        after_piece(patch, 2, lambda: move(target_id))
        assert not save(tier, 0, LARGE)
    assert load(tier, 0, LARGE) is None
    assert save(tier, 0, LARGE)
    assert load(tier, 0, LARGE) == features(0, LARGE)
    assert not caplog.messages
    target.client.flushall()
    for server in (source, target):
        server.client.execute_command("CLUSTER SETSLOT", slot, "NODE", source.client.execute_command("CLUSTER MYID"))


def test_any_node_that_is_named_will_do(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2, 0)
    for server in cluster.nodes:
        server.client.config_set("cluster-require-full-coverage", "no")
    gone, there = cluster.primaries
    lost, number = name_on(gone, cluster), name_on(there, cluster)
    tier = tier_at(cluster.url)
    assert save(tier, number)
    gone.kill()
    alone = tier_at(cluster.url, rest_s=0.2)
    both = tier_at(f"redis+cluster://127.0.0.1:{gone.port},127.0.0.1:{there.port}", rest_s=0.2)
    assert within(LONG_S, lambda: load(both, number) == features(number))
    assert load(both, lost) is None
    assert not within(2, lambda: load(alone, number))  # the only node that its URL names is gone


def test_nobody_waits_for_slots(make_cluster: MakeCluster) -> None:
    """Two of three nodes are stopped, as if their machines were gone: a load waits for one timeout, once per node."""
    cluster = make_cluster(3, 0)
    tier = tier_at(cluster.url, timeout_s=0.2)
    for number in NUMBERS:
        save(tier, number)
        load(tier, number)
    for server in cluster.primaries[:2]:
        os.kill(server.pid, signal.SIGSTOP)
    waits = []
    try:
        for number in NUMBERS:
            before = time.monotonic()
            load(tier, number)
            waits.append(time.monotonic() - before)
    finally:
        for server in cluster.primaries[:2]:
            os.kill(server.pid, signal.SIGCONT)
    assert sum(wait > 0.15 for wait in waits) <= 2 + 1  # a rest of a second may be over
    assert max(waits) < 0.8


def test_the_command_line_sees_all_nodes(cluster: Cluster) -> None:
    tier, records = tier_at(cluster.url), records_at(cluster.url)
    for number in NUMBERS:
        save(tier, number)
    records.put_many(dict.fromkeys(KEYS, b"value"))
    for server in cluster.primaries:
        server.client.execute_command("SET", f"others:{{{tag_of(server, cluster)}}}", "theirs")
    size = len(NUMBERS)
    listed = json.loads(mmcache("store", "ls", "--json", MMCACHE_STORE=cluster.url).stdout)
    assert (listed["remote"]["packages"]["num"], listed["remote"]["records"]["num"]) == (size, size)
    spoiled = PREFIX + identity(3).key
    cluster.primary_of(spoiled).client.set(spoiled, b"garbage")
    url = ",".join([f"redis+cluster://127.0.0.1:{cluster.primaries[0].port}", f"127.0.0.1:{cluster.primaries[1].port}"])
    checked = json.loads(mmcache("store", "check", "--json", MMCACHE_STORE=url).stdout)
    assert checked["remote"] == {"good": 2 * size - 1, "removed": 1}
    cleared = mmcache("store", "clear", MMCACHE_STORE=cluster.url)
    assert f"{2 * size - 1} entries removed" in cleared.stdout
    assert {name.partition(":")[0] for name in cluster.names()} == {"others"}
    assert len(cluster.names()) == len(cluster.primaries)


def tag_of(server: Server, cluster: Cluster) -> int:
    return next(number for number in range(1000) if cluster.primary_of(str(number)) is server)


def test_an_older_version_reads_what_this_one_wrote(cluster: Cluster, server: Server) -> None:
    """And this one what was written before, on one server: the names of whole packages are the same in all."""
    tier = tier_at(server.url)
    save(tier, 0)
    assert server.client.keys("*") == [(PREFIX + identity(0).key).encode()]
    server.client.set(PREFIX + identity(1).key, packed(1))
    assert load(tier, 1) == features(1)
