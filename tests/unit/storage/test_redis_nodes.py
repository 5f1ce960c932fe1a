# SPDX-License-Identifier: Apache-2.0
"""Nodes that nobody can reach, or no longer; those that serve are in tests/system/storage and tests/system/fleets."""

import threading
from types import SimpleNamespace

import pytest
import redis

from tests.support.refusals import no_threads
from tests.support.tiers import LONG_S
from vllm_mmcache.storage.redis_nodes import Nodes, RedisEntry


def test_no_thread_to_read_the_slots_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure stays one of the server, and the next one has the slots read."""
    nodes = Nodes("redis+cluster://127.0.0.1:1,127.0.0.1:2", 0.1, "a test")
    is_read = threading.Event()
    monkeypatch.setattr(nodes, "_read_slots", is_read.set)

    def fails() -> None:
        with pytest.raises(redis.ConnectionError):
            nodes.run("name", lambda client: client.ping())

    with no_threads():
        fails()
    assert not is_read.is_set()
    fails()
    assert is_read.wait(LONG_S)


def test_a_connection_that_is_closed_while_it_is_read() -> None:
    """By another thread, which closes the store: a failure as any other of a connection, and no bug."""
    closed = SimpleNamespace(send_command=lambda *words: None, _sock=None)
    with pytest.raises(redis.ConnectionError, match="closed"):
        RedisEntry(closed, "name", 1.0, 0)
