# SPDX-License-Identifier: Apache-2.0
"""Kinds of checkpoint that are never used are given up, and come back when they would have been used."""

import pytest

from vllm_mmcache.components.image_checkpoints.backoff import PATIENCE, PROBE_EVERY, Backoff, TrackedCheckpoints
from vllm_mmcache.components.image_checkpoints.positions import END, KINDS, START, Checkpoint

pytestmark = pytest.mark.answers


def key(number: int) -> bytes:
    return number.to_bytes(4, "big")


def test_backs_off_and_probes_and_comes_back() -> None:
    backoff = Backoff()
    for _ in range(PATIENCE):
        assert backoff.wanted() == KINDS
        backoff.wastes({END})
    assert backoff.wanted() == {START}
    asked = [backoff.ask() for _ in range(4 * PROBE_EVERY)]
    assert asked.count(KINDS) == 4
    assert asked.count(frozenset({START})) == 4 * (PROBE_EVERY - 1)
    backoff.record_hit({END})
    assert backoff.wanted() == KINDS


def test_one_use_in_a_while_is_enough() -> None:
    backoff = Backoff()
    for _ in range(10):
        for _ in range(PATIENCE - 1):
            backoff.wastes(KINDS)
        backoff.record_hit(KINDS)
    assert backoff.wanted() == KINDS


def test_evicted_unused_is_told_from_used() -> None:
    live = TrackedCheckpoints(Backoff())
    cached = {key(i) for i in range(40)}
    for i in range(40):
        assert live.add(key(i), Checkpoint(64, frozenset({END})))
    assert not live.add(key(0), Checkpoint(64, frozenset({END})))
    assert live.use(key(7))
    assert not live.use(key(99))
    assert live.sweep(cached.__contains__) == 0
    cached.clear()
    unused = sum(live.sweep(cached.__contains__) for _ in range(20))
    assert unused == 39
    assert len(live) == 0
    assert END not in live.backoff.wanted()


def test_a_reset_of_the_cache_is_no_verdict() -> None:
    live = TrackedCheckpoints(Backoff())
    for i in range(2 * PATIENCE):
        live.add(key(i), Checkpoint(64, KINDS))
    live.clear()
    assert live.sweep(lambda _: False) == 0
    assert live.backoff.wanted() == KINDS
