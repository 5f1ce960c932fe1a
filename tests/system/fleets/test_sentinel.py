# SPDX-License-Identifier: Apache-2.0
"""A primary with a replica, of which Sentinel says which one is the primary now."""

import time

import pytest

from tests.support.packages import features, load, save
from tests.support.store_server import TIMEOUT_S
from tests.support.tiers import LONG_S, within
from tests.support.valkeys import Watched
from tests.system.cli.test_commands import mmcache
from tests.system.fleets.load import NUM_PACKAGES, Load
from tests.system.fleets.test_cluster import KEYS, records_at, tier_at


def test_features_and_records(watched: Watched) -> None:
    tier, records = tier_at(watched.url), records_at(watched.url)
    assert save(tier, 0)
    assert load(tier, 0) == features(0)
    records.put_many({KEYS[0]: b"value"})
    assert records.get(KEYS[0], bytes) is not None
    listed = mmcache("store", "ls", MMCACHE_STORE=watched.url)
    assert "1 packages" in listed.stdout
    assert "1 records" in listed.stdout
    assert "2 entries removed" in mmcache("store", "clear", MMCACHE_STORE=watched.url).stdout


def test_a_failover_under_load(watched: Watched) -> None:
    tier = tier_at(watched.url, timeout_s=0.5, rest_s=1.0)
    with Load(tier) as loads:
        assert within(LONG_S, lambda: loads.hits > 300)
        killed = time.monotonic()
        watched.primary.kill()
        assert within(LONG_S, lambda: watched.address() == watched.replica.port)
        moved = time.monotonic()
        assert within(LONG_S, lambda: all(load(tier, number) is not None for number in range(NUM_PACKAGES)))
        found = time.monotonic()
        hits = loads.hits
        assert within(LONG_S, lambda: loads.hits > hits + 300)
    print(f"\nSentinel, failover {moved - killed:.1f} s: {loads.said(killed, found - killed)}")
    assert loads.wrong == 0
    assert loads.longest_s < 2.5  # a connection is asked for from Sentinel, then made: two timeouts each
    assert within(LONG_S, lambda: save(tier, 10_000))  # writing rests for a time of its own


@pytest.mark.parametrize("gone", ["first", "all"])
def test_sentinels_that_are_gone(watched: Watched, gone: str) -> None:
    """One of several will do; without any, what is connected goes on, and a new process has a miss."""
    listening = watched.url.removeprefix("redis+sentinel://")
    connected = tier_at(watched.url)
    assert save(connected, 0)
    assert load(connected, 0) == features(0)
    if gone == "all":
        watched.sentinel.kill()
        assert load(connected, 0) == features(0)
    url = f"redis+sentinel://127.0.0.1:1,{listening}"
    new = tier_at(url, timeout_s=0.5)
    before = time.monotonic()
    assert load(new, 0) == (features(0) if gone == "first" else None)
    assert time.monotonic() - before < 3
    assert new.is_open() == (gone == "all")


def test_a_name_that_sentinel_does_not_know(watched: Watched, caplog: pytest.LogCaptureFixture) -> None:
    tier = tier_at(watched.url.replace("/mmcache", "/another"), timeout_s=TIMEOUT_S)
    assert load(tier, 0) is None
    (line,) = caplog.messages
    assert "No master found for 'another'" in line


def test_sentinel_with_a_password_of_its_own(watched: Watched) -> None:
    watched.sentinel.client.execute_command("ACL SETUSER", "default", "resetpass", ">secret")
    assert load(tier_at(watched.url), 0) is None
    tier = tier_at(f"{watched.url}?sentinel_password=secret")
    assert save(tier, 0)
    assert load(tier, 0) == features(0)
