# SPDX-License-Identifier: Apache-2.0
"""Features that outlive an engine: on disk over a restart, in Valkey for a second replica, and when they are spoiled.

Two engines in turn stand for the two processes. What the first one saved the second one loads: bit for bit the same,
and the tower does not run.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.features.conftest import Put, Server
from tests.features.towers import Runs, ask_named, features_by_image
from vllm_mmcache.prove.engines import Answer, EngineConfig, EnginePool, Rig
from vllm_mmcache.prove.expect import assert_exact
from vllm_mmcache.prove.scenarios import filler, one, picture, user
from vllm_mmcache.zoo import FIRST_FAMILIES

pytestmark = pytest.mark.engine

QWEN = EngineConfig("qwen3-vl")


@pytest.fixture
def alone(pool: EnginePool) -> Iterator[EnginePool]:
    """The pool without an engine, before and after: the store belongs to an engine for good."""
    pool.close()
    yield pool
    pool.close()


def ask(rig: Rig, *numbers: int) -> list[Answer]:
    return [one(rig, user(filler(40), picture(n), "What is it?")) for n in numbers]


def assert_same_features(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(features, expected[name]) for name, features in found.items())


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.any_engine] * (name == "qwen3-vl")) for name in FIRST_FAMILIES]
)
def test_a_restart_with_a_filled_disk(alone: EnginePool, put: Put, tmp_path: Path, family: str) -> None:
    put(store=str(tmp_path), tower_trap=True)
    first = alone.get(EngineConfig(family))
    before = ask(first, 600, 601)
    saved = features_by_image(first)
    alone.close()
    second, runs = alone.get(EngineConfig(family)), Runs()
    after = ask(second, 601, 600)
    assert runs.new() == 0
    assert_same_features(features_by_image(second), saved)
    assert second.features.store.counts()["disk"]["hits"] == 2
    assert [one.token_ids for one in after] == [one.token_ids for one in reversed(before)]
    assert_exact(second, after)


def test_a_second_replica(alone: EnginePool, put: Put, server: Server) -> None:
    put(store=server.url, store_remote_timeout_s=1, tower_trap=True)
    first = alone.get(QWEN)
    ask(first, 602, 603)
    saved = features_by_image(first)
    alone.close()
    assert len(server.client.keys("*")) == 2
    second, runs = alone.get(QWEN), Runs()
    answers = ask(second, 602, 603)
    assert runs.new() == 0
    assert_same_features(features_by_image(second), saved)
    assert_exact(second, answers)


def test_a_server_that_dies(alone: EnginePool, put: Put, server: Server) -> None:
    """Answers stay right while it is gone, and when it is back and empty."""
    put(store=server.url, store_remote_timeout_s=1)
    rig = alone.get(QWEN)
    answers = ask(rig, 604)
    server.kill()
    try:
        rig.make_cold()
        answers += ask(rig, 604, 605)
    finally:
        server.start()
    rig.make_cold()
    answers += ask(rig, 604, 605)
    assert_exact(rig, answers)


def test_spoiled_files(alone: EnginePool, put: Put, tmp_path: Path) -> None:
    """A flipped bit and a cut file: the tower runs, the answer is right, the files are set aside."""
    put(store=str(tmp_path), tower_trap=True)
    rig, runs = alone.get(QWEN), Runs()
    ask(rig, 606, 607)
    assert rig.features.store.flush(10)
    flipped, cut = sorted((tmp_path / "features").glob("??/*.safetensors"))
    packed = bytearray(flipped.read_bytes())
    packed[-100] ^= 1
    flipped.write_bytes(packed)
    cut.write_bytes(cut.read_bytes()[:1000])
    rig.make_cold()
    runs.new()
    answers = ask(rig, 606, 607)
    assert runs.new() == 2
    assert rig.features.store.counts()["disk"]["set_aside"] == 2
    assert_exact(rig, answers)


def test_hostile_names_reach_no_path(alone: EnginePool, put: Put, tmp_path: Path) -> None:
    put(store=str(tmp_path / "in" / "store"), tower_trap=True, identity=False)
    rig = alone.get(QWEN)
    answers = [ask_named(rig, 608, name) for name in ("../../x", "/tmp/x", "a\0b", "x" * 1024**2)]
    assert rig.features.store.flush(10)
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    packages = [path for path in files if path.suffix == ".safetensors"]
    assert {path.parts[:3] for path in files} == {("in", "store", "features")}
    assert len(packages) == 3  # the name of 1 MB is too long to be kept
    assert all(len(path.stem) == 64 and set(path.stem) <= set("0123456789abcdef") for path in packages)
    assert_exact(rig, answers)


def test_a_ram_budget_below_the_images(alone: EnginePool, put: Put) -> None:
    """Three images in rotation, room for two: the tower runs each time, and answers are right."""
    put(tower_trap=True)
    rig = alone.get(QWEN)
    ask(rig, 609)
    (package,) = (package for _, package in rig.features.store.ram._packages.values())
    alone.close()
    put(feature_ram_bytes=2 * package.num_bytes, tower_trap=True)
    rig, runs, answers = alone.get(QWEN), Runs(), []
    for number in (609, 610, 611, 609, 610, 611):
        rig.forget_all_but_features()
        answers += ask(rig, number)
    assert runs.new() == 6
    assert rig.features.store.counts()["ram"]["evictions"] == 4
    assert rig.features.store.counts()["ram"]["held_bytes"] <= 2 * package.num_bytes
    assert_exact(rig, answers)
