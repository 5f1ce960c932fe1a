# SPDX-License-Identifier: Apache-2.0
"""An arena without room for an image's features: the tower runs, and what was there before stays.

Each test is its own control: with room again, or from a tier below, the same image needs no run.
"""

from pathlib import Path

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool

from tests.support.store_server import Put
from tests.support.tiers import LONG_S
from tests.support.towers import Runs, ask_about, slots
from vllm_mmcache.exactness.conversations import one, picture, user

pytestmark = pytest.mark.engine

QWEN = EngineConfig("qwen3-vl")


def test_an_image_larger_than_the_arena(alone: EnginePool, put: Put, tmp_path: Path) -> None:
    """Neither kept nor loaded; a smaller one beside it is."""
    small, large = user(picture(640, (96, 96)), "What?"), user(picture(641, (448, 448)), "What?")
    rig = alone.get(QWEN)
    one(rig, small)
    (slot,) = slots(rig).values()
    size = slot.end - slot.offset
    alone.close()

    put(store=str(tmp_path))  # room for both, and then not
    rig = alone.get(QWEN)
    one(rig, large)
    (slot,) = slots(rig).values()
    assert slot.num_bytes > size
    assert rig.features.flush(LONG_S)
    alone.close()
    put(store=str(tmp_path), feature_ram_bytes=size)
    rig, runs, answers = alone.get(QWEN), Runs(), []
    for expected in (2, 1):
        rig.forget_all_but_features()
        answers += [one(rig, small), one(rig, large)]
        assert runs.new() == expected
    counts = rig.features.store.counts()
    assert counts["ram"]["held_bytes"] <= size
    assert counts["ram"]["dropped"] == 2
    assert counts["disk"]["read_bytes"] == 0, "for what has no room it is not asked"
    rig.assert_exact(answers)


@pytest.mark.any_engine
def test_an_arena_whose_slots_are_all_held(alone: EnginePool, put: Put) -> None:
    """As by ranks that are slow to copy: nothing moves or goes, and what is new is not kept, until they are done."""
    rig = alone.get(QWEN)
    ask_about(rig, 642)
    (slot,) = slots(rig).values()
    alone.close()
    put(feature_ram_bytes=2 * (slot.end - slot.offset))
    rig, runs = alone.get(QWEN), Runs()
    store = rig.features.store
    answers = ask_about(rig, 642, 643)
    held = [store.ram.find(key) for key in slots(rig)]
    assert len(held) == 2
    assert runs.new() == 2
    for numbers, expected in (((644, 642), 1), ((644, 643), 1)):
        rig.forget_all_but_features()
        answers += ask_about(rig, *numbers)
        assert runs.new() == expected
        assert len(slots(rig)) == 2
    assert store.counts()["ram"]["dropped"] == 2
    for one_slot in held:
        assert one_slot is not None
        store.release(one_slot)
    for expected in (1, 0):
        rig.forget_all_but_features()
        answers += ask_about(rig, 644)
        assert runs.new() == expected
    rig.assert_exact(answers)


@pytest.mark.any_engine
def test_nothing_is_kept_in_ram(alone: EnginePool, put: Put, tmp_path: Path) -> None:
    """Memory for transit alone: what the tower gave is there until it is used, then it comes from disk each time."""
    put(store=str(tmp_path), feature_ram_bytes=0)
    rig, runs = alone.get(QWEN), Runs()
    answers = ask_about(rig, 645, 646)
    assert runs.new() == 2
    for hits in (0, 2, 4):
        assert rig.features.flush(LONG_S)
        rig.forget_all_but_features()
        answers += ask_about(rig, 645, 646)
        assert runs.new() == 0
        assert rig.features.store.counts()["disk"]["hits"] == hits
        assert not slots(rig)
        assert rig.features.store.counts()["ram"]["held_bytes"] == 0
    rig.assert_exact(answers)
