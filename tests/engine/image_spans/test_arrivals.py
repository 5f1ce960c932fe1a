# SPDX-License-Identifier: Apache-2.0
"""Every request is answered or refused, with each of vLLM's limits below, at and above the span of an image.

Two requests with images at once, and one of text behind them: where one could wait for ever, it holds up the other.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from mmcache_tools.harness.tolerances import TOLERANCE
from mmcache_tools.zoo import FAMILIES

from tests.engine.image_spans.arrivals import Engine, limited
from tests.support.sizes import larger
from vllm_mmcache.base.errors import UnschedulableImage
from vllm_mmcache.components.image_spans import hooks_api, hooks_engine, waiting
from vllm_mmcache.exactness.conversations import filler, picture, user

pytestmark = pytest.mark.engine

# The families whose images attend both ways; those that the zoo does not have yet join when it does.
PREFIX_LM = [
    name
    for name in FAMILIES
    if name.startswith(("gemma3", "gemma4", "paligemma", "molmo2")) and not name.endswith("-causal")
]
CONFIGS = [EngineConfig(family) for family in PREFIX_LM]
ONE_ON_ANY = [pytest.param(CONFIGS[0], marks=pytest.mark.any_engine), *CONFIGS[1:]]
SETTINGS = ("max_num_batched_tokens", "max_num_scheduled_tokens", "long_prefill_token_threshold")
LIMIT_S = 300.0  # of each request, however busy the machine is
HANG_S = 8.0  # after which a request that could be answered in half a second is taken to wait for ever

IMAGE = user(filler(20), picture(50), "What is it?")
OTHER = user(picture(51), "And this?" + filler(70))
TEXT = user("Say something." + filler(30))


def longest_span(rig: ZooRig) -> int:
    """Of the two conversations above. Leaves the engine cold: a hit that ends inside a span makes it shorter."""
    engine = Engine(rig)
    span = max(engine.span_tokens(IMAGE), engine.span_tokens(OTHER))
    rig.make_cold()
    return span


@pytest.mark.parametrize("config", CONFIGS, ids=PREFIX_LM)
@pytest.mark.parametrize("setting", SETTINGS)
def test_all_are_answered_or_refused(pool: EnginePool, config: EngineConfig, setting: str) -> None:
    rig = pool.get(config)
    span = longest_span(rig)
    answers: list[Any] = []
    for value in (span - 16, span - 1, span, span + 1, span + 40):
        rig.make_cold()
        with limited(rig, **{setting: value}) as engine:
            began = time.monotonic()
            ones = [engine.put(IMAGE), engine.put(OTHER), engine.put(TEXT)]
            engine.until_done(ones, LIMIT_S)
        expected = "answered" if value >= span else "refused"
        assert [one.state for one in ones] == [expected, expected, "answered"], (setting, value)
        assert all(one.done_at_s - began < LIMIT_S for one in ones if one.state == "answered")
        answers += [one.answer for one in ones if one.answer is not None]
        for one in ones[:2]:
            if value < span:
                assert f"image 1 of 1 has {span} tokens" in one.refusal
                assert f"{setting} is {value}, needed are {span}" in one.refusal
    assert rig.assert_exact(answers) <= TOLERANCE


@pytest.mark.parametrize("config", CONFIGS[:1], ids=PREFIX_LM[:1])
@pytest.mark.parametrize("setting", [SETTINGS[0], *(pytest.param(name, marks=larger) for name in SETTINGS[1:])])
def test_without_the_check_all_wait(
    pool: EnginePool, config: EngineConfig, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: what is refused above would wait, and the text behind it, too, as all seats are taken."""
    rig = pool.get(config)
    span = longest_span(rig)
    for hooks in (hooks_api, hooks_engine):
        monkeypatch.setattr(hooks, "why_never", lambda *_: "")
    with limited(rig, **{setting: span - 1}) as engine:
        ones = [engine.put(question) for question in (IMAGE, OTHER, IMAGE, OTHER, TEXT)]
        engine.until_done(ones, HANG_S)
        states = [one.state for one in ones]
    assert config.num_seqs == 4
    assert states == ["waiting"] * 5


@pytest.mark.parametrize("config", CONFIGS[:1], ids=PREFIX_LM[:1])
def test_what_came_past_the_check_is_ended(
    pool: EnginePool, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a front end without the plugin: the engine ends the request with an error, and lives."""
    rig = pool.get(config)
    span = longest_span(rig)
    monkeypatch.setattr(hooks_api, "_refuse", lambda *_: None)
    with limited(rig, max_num_scheduled_tokens=span - 1) as engine:
        ones = [engine.put(IMAGE), engine.put(OTHER), engine.put(TEXT)]
        engine.until_done(ones, LIMIT_S)
    assert [one.state for one in ones] == ["ended", "ended", "answered"]


@pytest.mark.parametrize("config", ONE_ON_ANY, ids=PREFIX_LM)
def test_offline_it_is_a_value_error_and_the_engine_goes_on(pool: EnginePool, config: EngineConfig) -> None:
    rig = pool.get(config)
    span = longest_span(rig)
    with limited(rig, max_num_scheduled_tokens=span - 1) as engine:
        with pytest.raises(ValueError, match="max_num_scheduled_tokens"):
            rig.ask([TEXT], [IMAGE])
        assert not engine.engine.has_unfinished_requests()
        assert rig.assert_exact(rig.ask([TEXT])) <= TOLERANCE


def stream(rig: ZooRig, num_steps: int) -> tuple[int, list[Any]]:
    """An image with a span as long as a step, behind long answers that never stop coming. Returns: steps, answers."""
    span = longest_span(rig)
    with limited(rig, max_num_batched_tokens=span) as engine:
        running = [engine.put(user(filler(8, start=i)), max_tokens=100) for i in range(3)]
        for _ in range(10):
            engine.step()
        image = engine.put(OTHER)
        while image.state == "waiting" and engine.num_steps < num_steps:
            engine.step()
            running += [
                engine.put(user(filler(8, start=i)), max_tokens=100)
                for i in range(sum(one.state == "waiting" for one in running), 3)
            ]
        engine.until_done([*running, image], LIMIT_S)
    waited = image.first_token_at_step - image.arrived_at_step
    return waited, [one.answer for one in (*running, image)]


@pytest.mark.parametrize("config", ONE_ON_ANY, ids=PREFIX_LM)
def test_an_image_as_long_as_a_step_gets_its_turn(pool: EnginePool, config: EngineConfig) -> None:
    """In a few steps; who had to rest for it answers the same."""
    rig = pool.get(config)
    waited, answers = stream(rig, 300)
    print(f"{config.family}: first token after {waited} steps")
    assert 0 < waited <= 4 * (waiting.FIRST_PATIENCE + 2)
    assert rig.assert_exact(answers) <= TOLERANCE


@pytest.mark.any_engine
@pytest.mark.parametrize("config", CONFIGS[:1], ids=PREFIX_LM[:1])
def test_without_turns_it_waits_for_all_to_end(
    pool: EnginePool, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control; 0.32 lets nobody pass, so it waits for the longest answer, and 0.33 lets newer ones pass."""
    monkeypatch.setattr(waiting.Waiting, "is_due", lambda self: False)
    waited, _ = stream(pool.get(config), 300)
    print(f"{config.family}: first token after {waited} steps")
    assert waited > 80


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_model_whose_every_image_is_too_long_does_not_start(pool: EnginePool, setting: str) -> None:
    pool.close()
    values = {"max_num_batched_tokens": 2048, "max_model_len": 2048} | {setting: 63}
    with pytest.raises(UnschedulableImage) as caught:
        pool.get(EngineConfig("gemma3", more=tuple(values.items())))
    assert str(caught.value) == (
        f"every image of this model has 64 tokens that must be computed in one step: {setting} is 63, needed are 64"
    )


def test_it_does_start_at_the_span(pool: EnginePool) -> None:
    """Negative control of the one above, and every limit at once in an engine that was started with them."""
    values = {"max_num_batched_tokens": 64, "max_num_scheduled_tokens": 64, "long_prefill_token_threshold": 64}
    rig = pool.get(EngineConfig("gemma3", more=tuple(values.items())))
    assert rig.assert_exact(rig.ask([IMAGE], [OTHER], [TEXT])) <= TOLERANCE
