# SPDX-License-Identifier: Apache-2.0
"""External hits on vLLM's scheduler, by a connector that moves real bytes (moving.py): each answer is the cold one.

Gemma 3 keeps the KV of its sliding layers at few places, so what a connector can find is what checkpoints have kept.
Negative controls: spoiled bytes are noticed, another picture finds nothing, and without checkpoints nothing is found.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from mmcache_tools.harness.scenarios import full_blocks
from mmcache_tools.harness.tolerances import BF16_SELF_TOLERANCE, assert_equals_answer

from tests.engine.connectors import moving
from tests.engine.connectors.moving import KEPT, connector, plan
from tests.engine.exactness.mixed import RememberingOracle, ask_mixed
from tests.support.sizes import larger
from tests.support.towers import Asked
from vllm_mmcache.base import status
from vllm_mmcache.exactness.answers import Inexact
from vllm_mmcache.exactness.conversations import filler, one, picture, user

pytestmark = pytest.mark.engine

GEMMA = EngineConfig("gemma3", more=connector(), num_blocks=150, num_seqs=6, max_tokens=1024)
DENSE = EngineConfig("gemma3", more=(*connector(), ("prefix_cache_retention_interval", None)))
QWEN = EngineConfig("qwen3-vl", more=connector(), num_blocks=100, num_seqs=6, max_tokens=1024)

NUM_BATCHES = 12

sparse = pytest.mark.parametrize("config", [pytest.param(GEMMA, id="gemma3")])
every = pytest.mark.parametrize(
    "config", [pytest.param(GEMMA, id="gemma3"), pytest.param(QWEN, id="qwen3-vl", marks=larger)]
)
keeps_all = pytest.mark.parametrize(
    ("config", "beside"),
    [
        pytest.param(DENSE, False, id="gemma3-dense", marks=larger),
        pytest.param(QWEN, False, id="qwen3-vl", marks=larger),
        pytest.param(QWEN, True, id="qwen3-vl-beside", marks=larger),
    ],
)


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    """Nothing is kept before a test, and behind it nothing is found."""
    KEPT.clear()
    plan()
    yield
    KEPT.clear()
    plan()


def restart(rig: ZooRig) -> None:
    """As behind a restart: nothing in the engine, all of it with the connector."""
    rig.make_cold()
    moving.PLAN.loaded.clear()


def asked(number: int, words: int) -> dict[str, object]:
    return user(filler(180), picture(number), filler(words, 3))


@every
@pytest.mark.parametrize("beside", [False, True])
def test_another_question_goes_on_at_the_image(pool: EnginePool, config: EngineConfig, beside: bool) -> None:
    """What is found ends at the image's end, to a block: where a checkpoint is."""
    rig = pool.get(config)
    plan(beside=beside)
    first = one(rig, asked(1, 60))
    restart(rig)
    second = one(rig, user(filler(180), picture(1), "And what is this?" + filler(60, 7)))
    end = full_blocks(rig, rig.image_spans(second)[0][1])
    assert moving.PLAN.loaded == [(0, end)]
    assert second.num_cached_tokens == end
    third = one(rig, user(filler(180), picture(2), "And what is this?" + filler(60, 7)))
    start = full_blocks(rig, rig.image_spans(second)[0][0])
    assert third.num_cached_tokens <= start, "another picture"
    rig.assert_exact([first, second, third])


@sparse
def test_without_checkpoints_nothing_is_found(
    pool: EnginePool, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control; what was found is what checkpoints have kept."""
    rig = pool.get(config)
    monkeypatch.setitem(status._is_on, "image_checkpoints", False)
    one(rig, asked(1, 60))
    restart(rig)
    second = one(rig, user(filler(180), picture(1), "And what is this?" + filler(60, 7)))
    assert moving.PLAN.loaded == []
    assert second.num_cached_tokens == 0
    rig.assert_exact([second])


@every
def test_spoiled_bytes_are_noticed(pool: EnginePool, config: EngineConfig) -> None:
    """Negative control of all of these: the bytes that are loaded are those that answer."""
    rig = pool.get(config)
    one(rig, asked(1, 60))
    restart(rig)
    for parts in KEPT.values():
        for part in parts:
            part.mul_(-1)
    answer = one(rig, asked(1, 60))
    assert moving.PLAN.loaded
    with pytest.raises(Inexact):
        rig.assert_exact([answer])


@keeps_all
def test_wherever_it_ends(pool: EnginePool, config: EngineConfig, beside: bool) -> None:
    """Inside the image, at its end, behind it, and before it; alone, and behind a hit of the engine's own."""
    rig = pool.get(config)
    cold = one(rig, asked(1, 90))
    start, end = rig.image_spans(cold)[0]
    answers = [cold]
    for place in (start // 32 * 32, start + 40, end, end + 64):
        restart(rig)
        most = place // rig.block_tokens * rig.block_tokens
        plan(most_tokens=most, beside=beside)
        answers.append(one(rig, asked(1, 90)))
        assert moving.PLAN.loaded == [(0, most)]
        restart(rig)
        plan(most_tokens=0)
        one(rig, user(filler(70)))
        plan(most_tokens=most, beside=beside)
        answers.append(one(rig, asked(1, 90)))
        ((begin, _),) = moving.PLAN.loaded
        assert 0 < begin < most
    rig.assert_exact(answers)


@every
@pytest.mark.parametrize("fails_from", [0, 3])
def test_a_load_beside_the_steps_that_fails(pool: EnginePool, config: EngineConfig, fails_from: int) -> None:
    """Fails at once, and half way: what was not loaded is calculated."""
    rig = pool.get(config)
    first = one(rig, asked(1, 60))
    restart(rig)
    plan(beside=True, fails_from=fails_from)
    again = one(rig, asked(1, 60))
    assert moving.PLAN.failed
    plan(most_tokens=0)
    warm = one(rig, asked(1, 60))  # nothing of what failed has stayed under its key
    rig.assert_exact([first, again, warm])


@larger
@sparse
def test_preemption_while_loading(pool: EnginePool, config: EngineConfig) -> None:
    """A load holds its blocks while others run out of them, are preempted and come back."""
    rig = pool.get(config)
    one(rig, asked(1, 60))
    restart(rig)
    preempted = rig.num_preemptions()
    plan(beside=True, is_held=True)
    with Asked(rig) as asking:
        asking.ask(asked(1, 60))
        asking.step(2)
        assert moving.PLAN.loaded
        moving.PLAN.most_tokens = 0
        for number in range(2, 7):
            asking.ask(user(filler(200, number), picture(number), filler(60)), max_tokens=200)
        answers = list(asking.until(3))
        assert rig.num_preemptions() > preempted
        moving.PLAN.is_held = False
        answers = list(asking.until(6))
    rig.assert_exact(answers)


@larger
@sparse
def test_mixed_requests(pool: EnginePool, config: EngineConfig) -> None:
    """Images, lengths, salts and prefixes in many orders, a cache that evicts and preempts, loads of both kinds."""
    rig = pool.get(config)
    answers = ask_mixed(rig, NUM_BATCHES, (224, 224))
    for beside in (False, True):
        restart(rig)
        plan(beside=beside)
        answers += ask_mixed(rig, NUM_BATCHES, (224, 224))
        assert len(moving.PLAN.loaded) > NUM_BATCHES
    plan(most_tokens=0)
    rig.assert_exact(answers, RememberingOracle(rig.oracle))


HYBRID = EngineConfig("qwen3.5", more=(*connector(), ("prefix_cache_retention_interval", None)))


@larger
@pytest.mark.parametrize("config", [pytest.param(HYBRID, id="qwen3.5")])
def test_hybrids_are_wrong_behind_a_load_in_the_step(pool: EnginePool, config: EngineConfig) -> None:
    """Why checkpoints are off there. A tripwire: when this fails, vLLM copies a Mamba state behind the load."""
    rig = pool.get(config)
    assert not status.is_on("image_checkpoints")
    cold = one(rig, asked(1, 200))
    restart(rig)
    plan(beside=True)
    beside = one(rig, asked(1, 200))
    assert moving.PLAN.loaded
    assert_equals_answer(beside, cold, BF16_SELF_TOLERANCE, "the cold run")
    restart(rig)
    plan()
    within = one(rig, asked(1, 200))
    assert moving.PLAN.loaded
    with pytest.raises(Inexact):
        assert_equals_answer(within, cold, BF16_SELF_TOLERANCE, "the cold run")
