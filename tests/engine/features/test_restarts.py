# SPDX-License-Identifier: Apache-2.0
"""Features that outlive an engine: on disk over a restart, in Valkey for a second replica, and when they are spoiled.

Two engines in turn stand for the two processes. What the first one saved the second one loads: bit for bit the same,
and the tower does not run.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from mmcache_tools.harness.engines import EngineConfig, EnginePool
from mmcache_tools.zoo import FIRST_FAMILIES

from tests.support.sizes import larger
from tests.support.store_server import TIMEOUT_S, Put, Server
from tests.support.tiers import LONG_S
from tests.support.towers import Runs, ask_about, ask_named, features_by_image, slots

pytestmark = pytest.mark.engine

QWEN = EngineConfig("qwen3-vl")


def assert_same_features(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(features, expected[name]) for name, features in found.items())


WHERE: dict[str, Any] = {"qwen3-vl": pytest.mark.any_engine, "qwen3.5": ()}


@pytest.mark.parametrize("family", [pytest.param(name, marks=WHERE.get(name, larger)) for name in FIRST_FAMILIES])
def test_a_restart_with_a_filled_disk(alone: EnginePool, put: Put, tmp_path: Path, family: str) -> None:
    put(store=str(tmp_path))
    first = alone.get(EngineConfig(family))
    before = ask_about(first, 600, 601)
    saved = features_by_image(first)
    assert first.features.flush(LONG_S)
    alone.close()
    second, runs = alone.get(EngineConfig(family)), Runs()
    after = ask_about(second, 601, 600)
    assert runs.new() == 0
    assert_same_features(features_by_image(second), saved)
    assert second.features.store.counts()["disk"]["hits"] == 2
    assert [one.token_ids for one in after] == [one.token_ids for one in reversed(before)]
    second.assert_exact(after)


def test_a_second_replica(alone: EnginePool, put: Put, server: Server) -> None:
    put(store=server.url, store_remote_timeout_s=TIMEOUT_S)
    first = alone.get(QWEN)
    ask_about(first, 602, 603)
    saved = features_by_image(first)
    assert first.features.flush(LONG_S)
    alone.close()
    assert len(server.client.keys("*")) == 2
    second, runs = alone.get(QWEN), Runs()
    answers = ask_about(second, 602, 603)
    assert runs.new() == 0
    assert_same_features(features_by_image(second), saved)
    second.assert_exact(answers)


@larger
def test_a_restart_with_an_encrypted_store(alone: EnginePool, put: Put, server: Server, tmp_path: Path) -> None:
    """From the directory, and on a replica from Valkey. Without the key it is an empty store."""
    key = tmp_path / "key"
    key.write_text("5a" * 32)
    key.chmod(0o600)
    there = {"store_remote_timeout_s": TIMEOUT_S, "store_key_file": str(key)}
    put(store=f"{tmp_path / 'store'} {server.url}", **there)
    first = alone.get(QWEN)
    ask_about(first, 613, 614)
    saved = features_by_image(first)
    assert first.features.flush(LONG_S)
    alone.close()
    files = list((tmp_path / "store" / "features").glob("??/*.safetensors"))
    assert len(files) == len(server.client.keys("*")) == 2
    lying = [file.read_bytes() for file in files] + [server.client.get(name) for name in server.client.keys("*")]
    stored = [features.view(torch.uint8).numpy().tobytes()[:64] for features in saved.values()]
    assert not [content for content in lying for begins in stored if begins in content or b"safetensors" in content]
    for store, tier in ((str(tmp_path / "store"), "disk"), (server.url, "remote")):
        put(store=store, **there)
        second, runs = alone.get(QWEN), Runs()
        answers = ask_about(second, 613, 614)
        assert runs.new() == 0
        assert second.features.store.counts()[tier]["hits"] == 2
        assert_same_features(features_by_image(second), saved)
        second.assert_exact(answers)
        alone.close()
    put(store=f"{tmp_path / 'store'} {server.url}", store_remote_timeout_s=TIMEOUT_S)
    without, runs = alone.get(QWEN), Runs()
    without.assert_exact(ask_about(without, 613, 614))
    assert runs.new() == 2, "the control: without the key the tower runs"
    assert {name: counts["set_aside"] for name, counts in without.features.store.counts().items()} == {
        "ram": 0,
        "disk": 0,
        "remote": 0,
    }


def test_a_server_that_dies(alone: EnginePool, put: Put, server: Server) -> None:
    """Answers stay right while it is gone, and when it is back and empty."""
    put(store=server.url, store_remote_timeout_s=TIMEOUT_S)
    rig = alone.get(QWEN)
    answers = ask_about(rig, 604)
    server.kill()
    try:
        rig.make_cold()
        answers += ask_about(rig, 604, 605)
    finally:
        server.start()
    rig.make_cold()
    answers += ask_about(rig, 604, 605)
    rig.assert_exact(answers)


def test_spoiled_files(alone: EnginePool, put: Put, tmp_path: Path) -> None:
    """A flipped bit and a cut file: the tower runs, the answer is right, the files are set aside."""
    put(store=str(tmp_path))
    rig, runs = alone.get(QWEN), Runs()
    ask_about(rig, 606, 607)
    assert rig.features.flush(LONG_S)
    flipped, cut = sorted((tmp_path / "features").glob("??/*.safetensors"))
    packed = bytearray(flipped.read_bytes())
    packed[-100] ^= 1
    flipped.write_bytes(packed)
    cut.write_bytes(cut.read_bytes()[:1000])
    rig.make_cold()
    runs.new()
    answers = ask_about(rig, 606, 607)
    assert runs.new() == 2
    assert rig.features.store.counts()["disk"]["set_aside"] == 2
    rig.assert_exact(answers)


def test_hostile_names_reach_no_path(alone: EnginePool, put: Put, tmp_path: Path) -> None:
    put(store=str(tmp_path / "in" / "store"), identity=False)
    rig = alone.get(QWEN)
    answers = [ask_named(rig, 608, name) for name in ("../../x", "/tmp/x", "a\0b", "x" * 1024**2)]
    assert rig.features.flush(LONG_S)
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    packages = [path for path in files if path.suffix == ".safetensors"]
    assert {path.parts[:3] for path in files} == {("in", "store", "features")}
    assert len(packages) == 3  # the name of 1 MB is too long to be kept
    assert all(len(path.stem) == 64 and set(path.stem) <= set("0123456789abcdef") for path in packages)
    rig.assert_exact(answers)


def test_a_ram_budget_below_the_images(alone: EnginePool, put: Put) -> None:
    """Three images in rotation, room for two: the tower runs each time, and answers are right."""
    rig = alone.get(QWEN)
    ask_about(rig, 609)
    (slot,) = slots(rig).values()
    size = slot.end - slot.offset
    alone.close()
    put(feature_ram_bytes=2 * size)
    rig, runs, answers = alone.get(QWEN), Runs(), []
    for number in (609, 610, 611, 609, 610, 611):
        rig.forget_all_but_features()
        answers += ask_about(rig, number)
    assert runs.new() == 6
    assert rig.features.store.counts()["ram"]["evictions"] == 4
    assert rig.features.store.counts()["ram"]["held_bytes"] <= 2 * size
    rig.assert_exact(answers)
