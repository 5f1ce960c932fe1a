# SPDX-License-Identifier: Apache-2.0
"""The vision tower runs once per image on real engines, and every answer is that of a cold run.

Negative controls: spoiled features spoil the answer, so hits really use them; a swapped image runs the tower and gets
its own answer; with the component off the tower runs as often as on stock.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from mmcache_tools.harness.oracle import Oracle
from mmcache_tools.zoo import FAMILIES, FIRST_FAMILIES, build_cached

from tests.support.store_server import Put
from tests.support.towers import Runs, ask_about, ask_named, features_by_image, side, slots, spoil
from vllm_mmcache.exactness.answers import Inexact
from vllm_mmcache.exactness.conversations import assistant, filler, one, picture, user

pytestmark = pytest.mark.engine

CONFIGS = [pytest.param(EngineConfig(family), id=family) for family in FIRST_FAMILIES]
ALL = [
    pytest.param(EngineConfig(family), id=family, marks=[pytest.mark.any_engine] * (family == "qwen3-vl"))
    for family in FAMILIES
]
QWEN = [pytest.param(EngineConfig("qwen3-vl"), id="qwen3-vl")]
# With levels (DeepStack) and without; CI asks these on every engine.
TWO_TOO = [
    pytest.param(EngineConfig(family), id=family, marks=[pytest.mark.any_engine] * (family in ("qwen3-vl", "gemma3")))
    for family in FIRST_FAMILIES
]


@pytest.mark.parametrize("config", TWO_TOO)
def test_the_tower_runs_once_per_image(pool: EnginePool, config: EngineConfig) -> None:
    """DeepStack levels included: for Qwen3-VL and Qwen3.5 they are part of the features."""
    rig, runs, image = pool.get(config), Runs(), picture(500)
    first = one(rig, user(filler(60), image, "What is it?"))
    assert runs.new() == 1
    rig.forget_all_but_features()
    second = one(rig, user(filler(40), image, "And what is at its edge?"))
    assert runs.new() == 0
    rig.assert_exact([first, second])


@pytest.mark.parametrize("config", CONFIGS)
def test_a_hit_that_ends_inside_the_image(pool: EnginePool, config: EngineConfig) -> None:
    """Stock runs the whole tower for the image's last few tokens."""
    rig, runs, image = pool.get(config), Runs(), picture(501, (448, 448))
    ask: list[Any] = [filler(170), image, "What is it?" + filler(20)]
    first = one(rig, user(*ask))
    rig.llm.llm_engine.reset_encoder_cache()
    assert rig.features.wait_until_known(60)
    second = one(rig, user(*ask[:2], "And where?" + filler(20)))
    (start, end) = rig.image_spans(second)[0]
    if rig.family.keeps_all_kv:
        assert start < second.num_cached_tokens < end
    assert runs.new() == 1
    rig.assert_exact([first, second])


@pytest.mark.parametrize("forget_kv", [False, True], ids=["kv-cached", "kv-evicted"])
@pytest.mark.parametrize("config", CONFIGS)
def test_only_the_new_image_of_a_later_turn(pool: EnginePool, config: EngineConfig, forget_kv: bool) -> None:
    rig, runs = pool.get(config), Runs()
    talk = [user(filler(60), picture(502), "and", picture(503), "Compare.")]
    answers = [one(rig, *talk)]
    assert runs.new() == 2
    if forget_kv:
        rig.forget_all_but_features()
    talk += [assistant(answers[0].text), user("And this one?", picture(504), "Well?")]
    answers.append(one(rig, *talk))
    assert runs.new() == 1
    rig.assert_exact(answers)


@pytest.mark.parametrize("config", TWO_TOO)
def test_known_and_new_images_in_one_batch(pool: EnginePool, config: EngineConfig) -> None:
    rig, runs = pool.get(config), Runs()
    one(rig, user(picture(505), picture(506), "Both."))
    rig.forget_all_but_features()
    runs.new()
    asks = [[user(picture(n), f"Number {n}." + filler(n - 500))] for n in (505, 507, 506, 507)]
    answers = rig.ask(*asks)
    assert runs.new() == 1
    rig.assert_exact(answers)


@pytest.mark.parametrize("config", ALL)
def test_spoiled_features_are_noticed(pool: EnginePool, config: EngineConfig) -> None:
    """Negative control: features that are not those of the image give another answer."""
    rig = pool.get(config)
    ask = user(filler(40), picture(508), "What is it?")
    one(rig, ask)
    assert spoil(rig) == 1
    rig.forget_all_but_features()
    with pytest.raises(Inexact):
        rig.assert_exact([one(rig, ask)])


@pytest.mark.parametrize("config", CONFIGS)
def test_a_swapped_image_runs_the_tower(pool: EnginePool, config: EngineConfig) -> None:
    rig, runs = pool.get(config), Runs()
    answers = [one(rig, user(filler(40), picture(n), "What is it?")) for n in (509, 510)]
    assert runs.new() == 2
    rig.assert_exact(answers)


@pytest.mark.any_engine
@pytest.mark.parametrize("config", QWEN)
def test_switched_off_it_is_stock(pool: EnginePool, config: EngineConfig, put: Put) -> None:
    put(features=False)
    rig, runs = pool.get(config), Runs()
    ask = user(filler(40), picture(511), "What is it?")
    one(rig, ask)
    rig.forget_all_but_features()
    one(rig, ask)
    assert runs.new() == 2
    assert not slots(rig)


@pytest.mark.any_engine
@pytest.mark.parametrize("config", QWEN)
def test_weights_that_change_where_nobody_sees_it(pool: EnginePool, config: EngineConfig) -> None:
    """vLLM resets the encoder cache after weights were changed in place: features of the old ones are not used."""
    rig, runs = pool.get(config), Runs()
    ask = user(filler(40), picture(505), "What is it?")
    one(rig, ask)
    weight = next(tensor for _, tensor in side(rig).tower.tensors() if tensor.numel())
    before = weight.clone()
    try:
        for altered, expected in ((before * 2, 1), (before, 0)):
            with torch.inference_mode():
                weight.copy_(altered)
            rig.forget_all_but_features()
            runs.new()
            one(rig, ask)
            assert runs.new() == expected
    finally:
        with torch.inference_mode():
            weight.copy_(before)
        rig.forget_all_but_features()


@pytest.mark.parametrize("config", QWEN)
def test_a_package_that_is_evicted_meanwhile(
    pool: EnginePool, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens between a look and its use: the tower runs, or the package that was loaded is used."""
    rig, runs = pool.get(config), Runs()
    ask = user(filler(40), picture(512), "What is it?")
    answers = [one(rig, ask)]
    store, find = rig.features.store, rig.features.store.find

    def gone_before(*asked: object) -> object:
        store.ram.clear()
        return find(*asked)

    def gone_after(*asked: object) -> object:
        slot = find(*asked)
        store.ram.clear()
        return slot

    for find_and_lose, expected in ((gone_before, 1), (gone_after, 0)):
        rig.forget_all_but_features()
        runs.new()
        with monkeypatch.context() as patched:
            patched.setattr(store, "find", find_and_lose)
            answers.append(one(rig, ask))
        assert runs.new() == expected
    rig.assert_exact(answers)


@pytest.mark.parametrize(
    "broken",
    ["store.Store.fetch", "store.Store.find", "store.Store.reserve", "hooks.Connector._is_awaited"],
)
@pytest.mark.parametrize("config", QWEN)
def test_a_lookup_that_fails_is_a_miss(
    pool: EnginePool, config: EngineConfig, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """A bug of ours, wherever it is, fails no request."""
    rig, runs = pool.get(config), Runs()
    with monkeypatch.context() as patched:
        patched.setattr(f"vllm_mmcache.components.features.engine.{broken}", lambda *asked: 1 // 0)
        answers = ask_about(rig, 513)
    assert runs.new() == 1
    rig.forget_all_but_features()
    answers += ask_about(rig, 513, 513)
    assert runs.new() <= 1
    rig.assert_exact(answers)


@pytest.mark.parametrize("name", ["../../x", "a\0b", "x" * 1024**2], ids=["path", "nul", "1MB"])
@pytest.mark.parametrize("config", QWEN)
def test_hostile_names(pool: EnginePool, config: EngineConfig, name: str, put: Put) -> None:
    put(identity=False)  # the store must do without that component
    rig = pool.get(config)
    rig.assert_exact([ask_named(rig, 514, name)])
    rig.forget_all_but_features()
    rig.assert_exact([ask_named(rig, 514, name)])


@pytest.mark.parametrize("config", QWEN)
def test_a_name_that_is_given_to_another_image(pool: EnginePool, config: EngineConfig, put: Put) -> None:
    """As after a restart, say, of a client that counts its images anew: features are of the pixels, not of the name."""
    put(identity=False)
    rig, runs = pool.get(config), Runs()
    answers = [ask_named(rig, 515, "image-1")]
    rig.forget_all_but_features()
    answers.append(ask_named(rig, 516, "image-1"))
    assert runs.new() == 2
    rig.assert_exact(answers)


@pytest.mark.parametrize("config", CONFIGS)
def test_weights_that_are_replaced_in_place(pool: EnginePool, config: EngineConfig, put: Put) -> None:
    """Features of the old weights are not used, and are found again when the old weights come back."""
    rig, runs = pool.get(config), Runs()
    other = build_cached(config.family, pool.zoo_root, seed=1)
    ask = user(filler(40), picture(517), "What is it?")
    answers = []
    try:
        for directory, expected in ((rig.directory, 1), (other, 1), (rig.directory, 0)):
            reload_weights(rig, directory)
            runs.new()
            answers.append(one(rig, ask))
            assert runs.new() == expected
        first, second, third = answers
        rig.assert_exact([first, third])
        reload_weights(rig, other)
        if config.family == "gemma3":  # vLLM 0.32 reloads it wrongly on the CPU: also text alone is far off
            rig.make_cold()
            put(features=False)
            assert one(rig, ask).token_ids == second.token_ids
        else:
            rig.assert_exact([second], Oracle(other))
    finally:
        reload_weights(rig, rig.directory)


def reload_weights(rig: ZooRig, directory: Path) -> None:
    """As an update in place, without a restart."""
    rig.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directory)})
    rig.forget_all_but_features()


@pytest.mark.parametrize("config", CONFIGS)
def test_image_by_image(pool: EnginePool, config: EngineConfig, put: Put) -> None:
    """Features of images that came together are bit for bit those of images that came alone."""
    put(tower_one_by_one=True)
    rig = pool.get(config)
    sizes = [(224, 224), (300, 160), (448, 448)]
    images = [picture(518 + i, size) for i, size in enumerate(sizes)]
    together = one(rig, user(*images, "Compare."))
    found = features_by_image(rig)
    rig.make_cold()
    alone = [one(rig, user(image, "What is it?")) for image in images]
    again = features_by_image(rig)
    assert len(found) == len(again) == len(sizes)
    assert all(torch.equal(features, again[name]) for name, features in found.items())
    rig.assert_exact([together, *alone])
