# SPDX-License-Identifier: Apache-2.0
"""A component that is switched off in an engine that runs does nothing any more, and nothing that it made is used.

The control is in each test: before, the component is seen at work.
"""

from collections.abc import Callable
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from mmcache_tools.harness.tolerances import TOLERANCE
from vllm.v1.core.kv_cache_utils import get_request_block_hasher

from tests.support.engine_configuration import CHOSEN
from tests.support.towers import Asked, ask_about, question, spoil
from vllm_mmcache.base import status
from vllm_mmcache.base.errors import EngineBusy
from vllm_mmcache.base.status import State
from vllm_mmcache.components.block_keys.hasher import BlockHasher
from vllm_mmcache.components.inner_checkpoints.cuts import CUTS
from vllm_mmcache.exactness.conversations import filler, one, picture, user
from vllm_mmcache.lifecycle.switch_off import switch_off
from vllm_mmcache.metrics import counters
from vllm_mmcache.prove.checks import words_before

pytestmark = [pytest.mark.engine, pytest.mark.any_engine]

WHY = "it was planted"
OFF = State("off", WHY)


def core(rig: ZooRig) -> Any:
    return rig.llm.llm_engine.engine_core.engine_core


def avoided(rig: ZooRig) -> float:
    """Runs of the tower that stored features save when a question comes again."""
    ask_about(rig, 900)
    rig.forget_all_but_features()
    before = counters.TOWER_IMAGES_AVOIDED.value
    ask_about(rig, 900)
    return counters.TOWER_IMAGES_AVOIDED.value - before


def checkpoints(rig: ZooRig) -> float:
    """Checkpoints that are made for two questions about a picture."""
    rig.make_cold()
    before = counters.CHECKPOINTS_MADE.value
    for words in (20, 30):
        one(rig, user(filler(words_before(rig)), picture(901, (448, 448)), "What is it?" + filler(words)))
    return counters.CHECKPOINTS_MADE.value - before


def cuts(rig: ZooRig) -> float:
    """Steps with checkpoints inside a chunk, for these questions."""
    schedule, found = rig.scheduler.schedule, []

    def noting(*args: Any, **kwargs: Any) -> Any:
        step = schedule(*args, **kwargs)
        found.append(hasattr(step, CUTS))
        return step

    rig.scheduler.schedule = noting
    try:
        checkpoints(rig)
    finally:
        del rig.scheduler.schedule
    return sum(found)


def spans(rig: ZooRig) -> float:
    """Whether steps hold images whole, and what of a step attends both ways."""
    from vllm_mmcache.components.image_spans import vllm_backend
    from vllm_mmcache.components.image_spans.attention_spans import cut_step
    from vllm_mmcache.components.image_spans.spans import keeps_images_whole

    found = []

    def noting(*args: Any, **kwargs: Any) -> Any:
        found.append(1)
        return cut_step(*args, **kwargs)

    rig.make_cold()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_backend, "cut_step", noting)
        ask_about(rig, 902)
    assert bool(found) == keeps_images_whole(rig.vllm_config)
    return len(found)


def own_keys(rig: ZooRig) -> float:
    """Keys of a request that are not those of vLLM's own hasher."""
    found: list[tuple[Any, list[bytes]]] = []
    add = rig.scheduler.add_request
    rig.scheduler.add_request = lambda request: (found.append((request, list(request.block_hashes))), add(request))[1]
    try:
        one(rig, user(filler(words_before(rig)), picture(903), "What is it?"))
    finally:
        del rig.scheduler.add_request
    ((request, keys),) = found
    hasher = core(rig).request_block_hasher
    stock = hasher.instead() if isinstance(hasher, BlockHasher) and hasher.instead is not None else hasher
    assert stock.__qualname__.startswith(get_request_block_hasher.__name__)
    request.block_hashes.clear()
    theirs = stock(request)[: len(keys)]
    assert keys
    assert len(keys) == len(theirs)
    return sum(mine != its for mine, its in zip(keys, theirs, strict=True))


WORK: dict[str, Callable[[ZooRig], float]] = {
    "features": avoided,
    "block_keys": own_keys,
    "inner_checkpoints": cuts,
    "image_checkpoints": checkpoints,
    "image_spans": spans,
}
OF_FAMILY = {
    "qwen3-vl": ("features", "block_keys"),
    "gemma3": ("image_checkpoints", "features", "block_keys", "image_spans"),
    "qwen3.5": ("inner_checkpoints", "image_checkpoints", "features", "block_keys"),
}


@pytest.mark.parametrize("family", OF_FAMILY)
def test_each_component_stops(alone: EnginePool, family: str) -> None:
    rig = alone.get(EngineConfig(family))
    for component in OF_FAMILY[family]:
        assert WORK[component](rig) > 0, f"{component} is not at work"
        switch_off(core(rig), component, WHY)
        assert status.in_force()[component] == OFF
        assert {status.of(role).get(component, OFF) for role in ("engine", "worker")} == {OFF}
        assert WORK[component](rig) == 0
        answers = [*ask_about(rig, 904, 905), one(rig, user(picture(904), picture(906), "Compare."))]
        if component == "image_spans":  # without it, vLLM's own attention on the CPU is causal over images
            assert rig.assert_equals_own_cold_run(answers) <= TOLERANCE
        else:
            rig.assert_exact(answers)
    switch_off(core(rig), component, "again")
    assert status.in_force()[component] == OFF


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen3.5"])
def test_nothing_wrong_is_used_afterwards(alone: EnginePool, family: str) -> None:
    """Spoiled features lie in RAM, in vLLM's encoder cache, and in KV blocks that were computed from them."""
    rig = alone.get(EngineConfig(family))
    (right,) = ask_about(rig, 910)
    assert spoil(rig) == 1
    rig.forget_all_but_features()
    (wrong,) = ask_about(rig, 910)
    assert wrong.logprobs != right.logprobs
    arena = rig.features._arena
    switch_off(core(rig), "features", WHY)
    assert not any(arena.buffer(0, arena.num_bytes)[:1_000_000])
    again = ask_about(rig, 910, 910)
    assert again[0].num_cached_tokens == 0
    rig.assert_exact(again)


def test_with_requests_under_way(alone: EnginePool) -> None:
    """They begin anew, and go on with the answers that they have."""
    rig = alone.get(EngineConfig("qwen3-vl"))
    with Asked(rig) as asked:
        for number in (920, 921):
            asked.ask(question(number), max_tokens=24)
        asked.step(6)
        assert any(request.num_output_tokens for request in rig.scheduler.requests.values())
        if CHOSEN.runner == 1:
            with pytest.raises(EngineBusy):
                switch_off(core(rig), "resumed_images", WHY)
            assert status.of("engine")["resumed_images"].state == "on"
        for component in ("block_keys", "features"):
            switch_off(core(rig), component, WHY)
        rig.assert_exact(asked.until(2))
    assert own_keys(rig) == 0
    if CHOSEN.runner == 1:
        switch_off(core(rig), "resumed_images", WHY)
        assert status.in_force()["resumed_images"] == OFF
    rig.assert_exact(ask_about(rig, 920, 922))


def test_a_request_that_was_made_before_gets_other_keys(alone: EnginePool) -> None:
    """The engine's input thread makes requests before its steps see them."""
    rig = alone.get(EngineConfig("qwen3-vl"))
    engine_core = core(rig)
    preprocess, made = engine_core.preprocess_add_request, []

    def made_before(request: Any) -> Any:
        made.append(preprocess(request))
        switch_off(engine_core, "block_keys", WHY)
        assert isinstance(made[0][0]._block_hasher, BlockHasher)
        return made[0]

    engine_core.preprocess_add_request = made_before
    try:
        answers = ask_about(rig, 930)
    finally:
        del engine_core.preprocess_add_request
    ((request, _),) = made
    assert request._block_hasher is engine_core.request_block_hasher
    rig.assert_exact(answers + ask_about(rig, 930))
