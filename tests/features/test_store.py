# SPDX-License-Identifier: Apache-2.0
"""The store over its tiers: order of lookup, filling upwards, writing behind, and never waiting."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.features.conftest import Server
from tests.features.packages import BUDGET_BYTES, identity, package, same
from tests.features.test_package import HOSTILE
from tests.sizes import scaled
from vllm_mmcache.errors import SettingsError
from vllm_mmcache.features.disk import DiskTier
from vllm_mmcache.features.package import Package
from vllm_mmcache.features.ram import RamTier
from vllm_mmcache.features.remote import RemoteTier
from vllm_mmcache.features.store import Store, open_store
from vllm_mmcache.settings import load_settings

Open = Callable[..., Store]


@pytest.fixture
def three(server: Server, tmp_path: Path) -> Open:
    """Opens stores over one server, each with a directory of its own."""

    def opened(name: str) -> Store:
        remote = RemoteTier(server.url, ttl_s=100, max_bytes=BUDGET_BYTES, timeout_s=1)
        return Store(RamTier(BUDGET_BYTES), [DiskTier(tmp_path / name, BUDGET_BYTES), remote])

    return opened


def hits(store: Store) -> dict[str, float]:
    return {name: counts["hits"] for name, counts in store.counts().items()}


def test_nearest_first_and_filling_upwards(three: Open) -> None:
    first = three("a")
    kept = package()
    first.save(identity(), kept)
    assert first.find(identity())[0] is kept
    assert hits(first) == {"ram": 1, "disk": 0, "remote": 0}
    assert first.flush(10)

    restarted = three("a")
    assert restarted.has(identity())
    assert same(restarted.find(identity())[0], kept)
    assert same(restarted.find(identity())[0], kept)
    assert hits(restarted) == {"ram": 1, "disk": 1, "remote": 0}

    replica = three("b")
    assert same(replica.find(identity())[0], kept)
    assert hits(replica) == {"ram": 0, "disk": 0, "remote": 1}
    assert replica.flush(10)
    assert replica.counts()["remote"]["saved"] == 0  # it came from there
    assert same(three("b").below[0].load(identity()), kept)


def test_a_damaged_file_is_healed_from_the_replica(three: Open) -> None:
    store = three("a")
    store.save(identity(), package())
    assert store.flush(10)
    disk = store.below[0]
    assert isinstance(disk, DiskTier)
    disk.directory.path_of(identity().key).write_bytes(b"")
    again = three("a")
    assert same(again.find(identity())[0], package())
    assert again.flush(10)
    assert same(three("a").below[0].load(identity()), package())


def test_a_miss_is_none_everywhere(three: Open) -> None:
    store = three("a")
    assert store.find(identity())[0] is None
    assert not store.has(identity())
    assert {counts["misses"] for counts in store.counts().values()} == {1}


def test_another_model_misses(three: Open) -> None:
    store = three("a")
    store.save(identity(), package())
    assert store.flush(10)
    for field in ("content_id", "model", "processor", "dtype", "layout"):
        other = replace(identity(), **{field: "other"})
        assert store.find(other)[0] is None
        assert not store.has(other)


@pytest.mark.parametrize("content_id", HOSTILE)
def test_hostile_content_ids(three: Open, tmp_path: Path, content_id: str) -> None:
    store = three("a")
    asked = replace(identity(), content_id=content_id)
    store.save(asked, package())
    assert store.flush(10)
    found = three("a").find(asked)[0]
    assert same(found, package()) if len(content_id) < 1000 else found is None
    files = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert files <= {f"{asked.key}.safetensors", "lock"}


def test_saving_never_waits_and_the_queue_is_bounded(tmp_path: Path) -> None:
    class SlowDisk(DiskTier):
        def _write(self, key: str, packed: bytes) -> None:
            time.sleep(0.05)

    size = package().num_bytes
    disk = SlowDisk(tmp_path, BUDGET_BYTES)
    store = Store(RamTier(BUDGET_BYTES), [disk], queue_bytes=5 * size)
    start = time.perf_counter()
    for number in range(50):
        store.save(identity(number), package(number))
        store.save(identity(number), package(number))  # already waiting, or dropped again
    assert time.perf_counter() - start < 0.5
    assert not store.flush(0.01)
    assert store.flush(10)
    counts = disk.counters.snapshot()
    assert 5 <= counts["saved"] <= 15
    assert counts["dropped"] >= 80
    assert store.has(identity(0))
    assert store.close()
    store.save(identity(100), package(100))
    assert same(store.find(identity(100))[0], package(100))  # RAM goes on
    assert disk.counters.snapshot()["dropped"] == counts["dropped"] + 1


def test_a_bug_of_ours_ends_neither_thread_nor_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(RamTier(BUDGET_BYTES), [DiskTier(tmp_path, BUDGET_BYTES)])
    broken = Package({"features": package().tensors["features"].T})  # safetensors takes contiguous tensors only
    store.save(identity(0), broken)
    store.save(identity(1), package(1))
    assert store.flush(10)
    assert store.counts()["disk"]["errors"] == 1
    assert store.counts()["disk"]["saved"] == 1
    assert "could not write a package" in caplog.text


def test_threads(three: Open) -> None:
    store = Store(RamTier(5 * package().num_bytes), three("a").below)
    wrong: list[int] = []

    def work(start: int) -> None:
        for step in range(scaled(300)):
            number = (start + step * 7) % 30
            found = store.find(identity(number))[0]
            if found is None:
                store.save(identity(number), package(number))
            elif not same(found, package(number)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.close()
    assert not wrong
    counts = store.counts()
    assert counts["ram"]["hits"] > 0
    assert counts["disk"]["hits"] > 0
    assert sum(tier["errors"] + tier["set_aside"] for tier in counts.values()) == 0


def test_opened_as_the_settings_say(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(open_store(load_settings()).counts()) == ["ram"]
    monkeypatch.setenv("MMCACHE_STORE", f"{tmp_path}/store, {server.url}")
    monkeypatch.setenv("MMCACHE_STORE_REMOTE_TIMEOUT_S", "1")
    store = open_store(load_settings())
    assert list(store.counts()) == ["ram", "disk", "remote"]
    store.save(identity(), package())
    assert store.close()
    assert same(open_store(load_settings({"store": f"{tmp_path}/store"})).find(identity())[0], package())
    assert same(open_store(load_settings({"store": server.url})).find(identity())[0], package())
    with pytest.raises(SettingsError, match="bogus"):
        open_store(load_settings({"store": server.url + "?bogus=1"}))
