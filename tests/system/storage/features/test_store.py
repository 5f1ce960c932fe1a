# SPDX-License-Identifier: Apache-2.0
"""The store over a real server as its farthest tier: order of lookup, filling upwards, healing, and the settings."""

from pathlib import Path

import pytest
from vllm_mmcache.components.features.disk import DiskTier
from vllm_mmcache.components.features.remote import RemoteTier

from tests.support.packages import BUDGET_BYTES, features, identity, load
from tests.support.store_server import TIMEOUT_S, Server
from tests.support.tiers import LONG_S
from tests.unit.components.features.engine.test_store import Open, counts, fetched, found, opened, put
from vllm_mmcache.base.errors import SettingsError
from vllm_mmcache.base.settings import load_settings
from vllm_mmcache.components.features.engine.store import Store, open_tiers

__all__ = ["opened"]


@pytest.fixture
def three(server: Server, tmp_path: Path, opened: Open) -> Open:
    """Opens stores over one server, each with a directory of its own."""

    def open_three(name: str) -> Store:
        remote = RemoteTier(server.url, ttl_s=100, max_bytes=BUDGET_BYTES, timeout_s=TIMEOUT_S)
        return opened(DiskTier(tmp_path / name, BUDGET_BYTES), remote)

    return open_three


def test_nearest_first_and_filling_upwards(three: Open) -> None:
    first = three("a")
    assert put(first, 0)
    assert fetched(first, 0) == features(0)
    assert counts(first, "hits") == {"ram": 1, "disk": 0, "remote": 0}
    assert first.flush(LONG_S)

    restarted = three("a")
    assert found(restarted, 0) is None  # not yet
    assert fetched(restarted, 0) == features(0)
    assert fetched(restarted, 0) == features(0)
    assert counts(restarted, "hits") == {"ram": 2, "disk": 1, "remote": 0}

    replica = three("b")
    assert fetched(replica, 0) == features(0)
    assert counts(replica, "hits") == {"ram": 1, "disk": 0, "remote": 1}
    assert replica.flush(LONG_S)
    assert counts(replica, "saved") == {"ram": 1, "disk": 1, "remote": 0}  # it came from there
    assert load(three("b").below[0], 0) == features(0)


def test_a_damaged_file_is_healed_from_the_replica(three: Open) -> None:
    store = three("a")
    assert put(store, 0)
    assert store.flush(LONG_S)
    disk = store.below[0]
    assert isinstance(disk, DiskTier)
    disk.directory.path_of(identity().key).write_bytes(b"")
    again = three("a")
    assert fetched(again, 0) == features(0)
    assert again.flush(LONG_S)
    assert counts(again, "set_aside")["disk"] == 1
    assert load(three("a").below[0], 0) == features(0)


def test_a_miss_is_a_miss_everywhere(three: Open) -> None:
    store = three("a")
    assert fetched(store, 0) is None
    assert counts(store, "misses") == {"ram": 1, "disk": 1, "remote": 1}
    assert not store._fetches  # the next one looks anew
    assert fetched(store, 0) is None
    assert counts(store, "misses") == {"ram": 2, "disk": 2, "remote": 2}


def test_opened_as_the_settings_say(server: Server, tmp_path: Path, opened: Open) -> None:
    assert open_tiers(load_settings()) == []
    more = {"store_remote_timeout_s": TIMEOUT_S}
    both = opened(*open_tiers(load_settings({"store": f"{tmp_path}/store, {server.url}", **more})))
    assert list(both.counts()) == ["ram", "disk", "remote"]
    assert put(both, 0)
    assert both.close(LONG_S)
    for place in (f"{tmp_path}/store", server.url):
        assert fetched(opened(*open_tiers(load_settings({"store": place, **more}))), 0) == features(0)
    with pytest.raises(SettingsError, match="bogus"):
        open_tiers(load_settings({"store": server.url + "?bogus=1"}))
