# SPDX-License-Identifier: Apache-2.0
"""Features that nobody uses go: from the directory, also under a server that only runs, and from Valkey."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm_mmcache.components.features.disk import DiskTier
from vllm_mmcache.components.features.remote import PREFIX, RemoteTier

from tests.support.packages import BUDGET_BYTES, SHAPE, features, held_bytes, identity, load, save
from tests.support.store_server import TIMEOUT_S, Server
from tests.support.tiers import LONG_S, within
from vllm_mmcache.base.settings import load_settings
from vllm_mmcache.components.features import writer as writer_module
from vllm_mmcache.components.features.arena import Arena
from vllm_mmcache.components.features.engine import store as store_module
from vllm_mmcache.components.features.engine.cost_model import CostModel
from vllm_mmcache.components.features.engine.ram_tier import ALIGN_BYTES, RamTier
from vllm_mmcache.components.features.engine.store import Store, open_tiers

TTL_S = 1000


def disk(place: Path, ttl_s: int = TTL_S) -> DiskTier:
    return DiskTier(place, BUDGET_BYTES, ttl_s=ttl_s)


def age(path: Path, seconds: float = 1.5 * TTL_S) -> None:
    """As if it was last used so long ago."""
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.fixture
def opened() -> Iterator[Callable[..., Store]]:
    """Opens stores over one tier."""
    made: list[tuple[Store, Arena]] = []

    def open_store(tier: DiskTier | RemoteTier) -> Store:
        arena = Arena.create(64 * ALIGN_BYTES, 1)
        costs = CostModel(lambda num_tokens: None, None, [tier.counters])
        made.append((Store(arena, RamTier(arena.num_bytes), [tier], costs), arena))
        return made[-1][0]

    yield open_store
    for store, arena in made:
        store.close(LONG_S)
        arena.close()


def put(store: Store, number: int) -> None:
    slot = store.reserve(identity(number), SHAPE)
    assert slot is not None
    store._arena.buffer(slot.offset, SHAPE.num_bytes)[:] = features(number)
    store.keep(slot, identity(number), SHAPE)
    assert store.flush(LONG_S)


def use(store: Store, number: int) -> None:
    """As a request whose features are in RAM."""
    slot = store.find(identity(number), SHAPE)
    assert slot is not None
    store.release(slot)
    assert store.flush(LONG_S)


@pytest.mark.parametrize("ttl_s", [TTL_S, 0])
def test_what_was_not_used_goes_and_what_was_stays(tmp_path: Path, ttl_s: int) -> None:
    tier = disk(tmp_path, ttl_s)
    paths = [tier.directory.path_of(identity(number).key) for number in range(4)]
    for number, path in enumerate(paths):
        assert save(tier, number)
        age(path, TTL_S / 2 if number == 3 else 1.5 * TTL_S)
    assert load(tier, 0) == features(0)  # a hit is a use
    assert save(tier, 1)  # and so is that the tower ran again
    tier.directory.sweep(BUDGET_BYTES)
    assert [path.exists() for path in paths] == [True, True, ttl_s == 0, True]
    tier.directory.sweep(BUDGET_BYTES)
    account = int((tier.directory.root / "lock").read_text())
    assert account == held_bytes(tmp_path)


def test_what_was_set_aside_goes_too(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    for number in (0, 1):
        assert save(tier, number)
        path = tier.directory.path_of(identity(number).key)
        path.write_bytes(b"no package")
        assert load(tier, number) is None
        if number == 0:
            age(tier.directory.root / "aside" / path.name)
    tier.directory.sweep(BUDGET_BYTES)
    assert [entry.key for entry in tier.directory.aside()] == [identity(1).key]


def test_a_store_that_is_opened_removes_it_and_again_later(
    tmp_path: Path, opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks for anything."""
    first = disk(tmp_path)
    for number in (0, 1):
        assert save(first, number)
    paths = [first.directory.path_of(identity(number).key) for number in (0, 1)]
    age(paths[0])
    monkeypatch.setattr(writer_module, "TIDY_S", 0.05)
    store = opened(disk(tmp_path))
    assert within(LONG_S, lambda: not paths[0].exists())
    assert paths[1].exists()
    age(paths[1])
    assert within(LONG_S, lambda: not paths[1].exists())
    assert within(LONG_S, lambda: store.below[0].counters.snapshot()["evictions"] == 2)


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    tier = disk(tmp_path / "store")
    tier.tidy()
    assert not (tmp_path / "store").exists()
    assert tier.counters.snapshot()["errors"] == 0


def test_a_use_in_ram_is_one_of_the_directory_now_and_then(
    tmp_path: Path, opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or what is asked for all the time would be gone after a restart."""
    tier = disk(tmp_path)
    store = opened(tier)
    put(store, 0)
    path = tier.directory.path_of(identity(0).key)
    age(path)
    now = time.monotonic()
    use(store, 0)
    assert time.time() - path.stat().st_mtime > TTL_S  # not every time
    monkeypatch.setattr(store_module, "monotonic", lambda: now + TTL_S / 2 + 1)
    use(store, 0)
    assert time.time() - path.stat().st_mtime < TTL_S / 2
    age(path)
    use(store, 0)
    assert time.time() - path.stat().st_mtime > TTL_S
    path.unlink()
    monkeypatch.setattr(store_module, "monotonic", lambda: now + 2 * TTL_S)
    use(store, 0)
    assert load(tier, 0) == features(0)  # and it is there again


def remote(server: Server, ttl_s: int = TTL_S) -> RemoteTier:
    return RemoteTier(server.url, ttl_s=ttl_s, max_bytes=BUDGET_BYTES, timeout_s=TIMEOUT_S)


def test_a_hit_in_valkey_is_for_another_while(server: Server) -> None:
    tier = remote(server)
    assert save(tier, 0)
    name = PREFIX + identity(0).key
    server.client.expire(name, 100)
    assert load(tier, 1) is None
    assert server.client.ttl(name) <= 100
    assert load(tier, 0) == features(0)
    assert server.client.ttl(name) > TTL_S - 100


def test_a_server_that_takes_no_expiry_still_serves(server: Server) -> None:
    """As a replica of it, which is read-only."""
    tier = remote(server)
    assert save(tier, 0)
    server.client.execute_command("ACL", "SETUSER", "default", "-expire", "-persist")
    try:
        assert load(tier, 0) == features(0)
        assert tier.counters.snapshot()["errors"] == 0
    finally:
        server.client.execute_command("ACL", "SETUSER", "default", "+@all")


def test_no_ttl_is_for_ever(server: Server) -> None:
    name = PREFIX + identity(0).key
    assert save(remote(server), 0)
    for use_it in (save, load):
        server.client.expire(name, 100)
        assert use_it(remote(server, 0), 0)
        assert server.client.ttl(name) == -1
    server.client.flushall()
    assert save(remote(server, 0), 0)
    assert server.client.ttl(name) == -1
    assert server.client.dbsize() == 1


def test_the_setting_reaches_both_tiers(server: Server, tmp_path: Path) -> None:
    below = open_tiers(load_settings({"store": f"{tmp_path} {server.url}", "store_ttl": "2h"}))
    assert [tier.ttl_s for tier in below] == [7200, 7200]
