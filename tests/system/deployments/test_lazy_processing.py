# SPDX-License-Identifier: Apache-2.0
"""Pixels stay behind on real servers: with each of vLLM's processor caches, and after each restart.

Servers, one after the other, share a store. Each answers as stock does.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import Work
from tests.support.deployment import TWO_RANKS, Answer, Deployment, deployed
from tests.support.sizes import larger

pytestmark = pytest.mark.engine


def work(server: Deployment) -> Work:
    """What it has done since it started."""
    names = ("items_processed", "items_deferred", "pixels_made", "pixels_made_late", "tower_images")
    return Work(*(int(server.total(name)) for name in names))


def lose_features(store: Path) -> None:
    """All packages, but not the records."""
    kept = [path for path in store.iterdir() if path.name.startswith("records")]
    assert kept
    for path in set(store.iterdir()) - set(kept):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@larger
def test_a_restart_and_another_kind_of_cache(model: Path, stock: list[Answer], tmp_path: Path) -> None:
    store = tmp_path / "store"
    chosen: dict[str, Any] = {"MMCACHE_STORE": str(store), "MMCACHE_STORE_WAIT_S": "20"}
    with deployed(model, tmp_path / "lru", **chosen) as server:
        assert server.components()["lazy_processing"] == ("on", "")
        assert [server.ask(n).equals(stock[n]) for n in (0, 1)] == [True, True]
        assert work(server) == Work(processed=2, tower=2)
        server.forget()
        assert server.ask(0).equals(stock[0])
        assert work(server) == Work(processed=2, deferred=1, tower=2)
    lose_features(store)
    with deployed(model, tmp_path / "shm", "--mm-processor-cache-type", "shm", **chosen) as server:
        assert server.ask(0).equals(stock[0])
        assert server.total("images_decoded") == 0  # in the API server
        assert work(server) == Work(deferred=1, made=1, tower=1)
        assert server.ask(0).equals(stock[0])
        assert work(server) == Work(deferred=2, made=1, tower=1)
        assert server.ask(2).equals(stock[2])
        assert work(server) == Work(deferred=2, made=1, processed=1, tower=2)


@larger
def test_no_cache_and_several_servers(model: Path, stock: list[Answer], tmp_path: Path) -> None:
    store = tmp_path / "store"
    chosen: dict[str, Any] = {"MMCACHE_STORE": str(store), "MMCACHE_STORE_WAIT_S": "20"}
    with deployed(model, tmp_path / "lru", **chosen) as server:
        assert [server.ask(n).equals(stock[n]) for n in (0, 1, 2)] == [True] * 3
    with deployed(model, tmp_path / "none", "--mm-processor-cache-gb", "0", **chosen) as server:
        assert [server.ask(n).equals(stock[n]) for n in (0, 2)] == [True, True]
        assert server.total("images_decoded") == 0
        assert work(server) == Work(deferred=2)
    lose_features(store)
    with deployed(model, tmp_path / "several", "--api-server-count", "2", *TWO_RANKS, **chosen) as server:
        assert server.ask(1).equals(stock[1])
        assert work(server) == Work(deferred=1, made=1, tower=1)


@larger
def test_nothing_is_deferred_where_features_are_not_kept(model: Path, stock: list[Answer], tmp_path: Path) -> None:
    """Its images are processed side by side all the same, and the report says so."""
    with deployed(model, tmp_path / "log", MMCACHE_FEATURES="0") as server:
        assert server.components()["lazy_processing"] == ("on", "")
        assert "images go to the engine with their pixels: features are off" in server.log()
        for _ in range(2):
            assert server.ask(0).equals(stock[0])
            server.forget()
        assert server.total("items_processed") == 2
        assert server.total("items_deferred") == 0
