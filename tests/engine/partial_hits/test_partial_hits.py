# SPDX-License-Identifier: Apache-2.0
"""A prefix hit that ends inside an image: the rest of the image is computed, and the answer is that of a cold run.

Hits end there wherever an image's end is no multiple of the block size, and where a client has left while its image was
computed in steps. Negative control: another image of as many tokens is no hit. `make matrix` runs other block sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from vllm import SamplingParams

from tests.support.sizes import larger
from tests.support.towers import Asked, forget_outputs
from vllm_mmcache.exactness.answers import NUM_LOGPROBS, Answer
from vllm_mmcache.exactness.conversations import assistant, filler, one, picture, user

pytestmark = pytest.mark.engine

SIZE = {"qwen3-vl": (448, 448), "qwen3.5": (448, 448), "gemma3": (224, 224)}
SHOTS = [(width, width * 800 // 1280) for width in (128, 256, 384, 448)]  # pixels
QUESTION = filler(170, 5)  # so long that vLLM itself keeps no state near the image
FAMILIES = ("qwen3-vl", "qwen3.5", "gemma3")


def unit(tokens: int) -> EngineConfig:
    """Hits of a hybrid end at multiples of this, not of its large block."""
    return EngineConfig("qwen3.5", more=(("prefix_match_unit", tokens),))


CONFIGS = [
    *(pytest.param(EngineConfig(family), id=family) for family in FAMILIES),
    *(
        pytest.param(EngineConfig(family, block_tokens=block), id=f"{family}-{block}", marks=larger)
        for family in ("qwen3-vl", "gemma3")
        for block in (16, 128)
    ),
    *(pytest.param(unit(tokens), id=f"qwen3.5-unit-{tokens}", marks=larger) for tokens in (1, 16, 32, 80)),
]


def about(rig: ZooRig, words: int, number: int, question: str) -> dict[str, Any]:
    return user(filler(words), picture(number, SIZE[rig.config.family]), question + QUESTION)


@pytest.mark.any_engine
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("with_features", [True, False], ids=["features", "tower"])
def test_the_rest_of_the_image_is_computed(pool: EnginePool, config: EngineConfig, with_features: bool) -> None:
    """With the features that are kept, and with a tower that runs again."""
    rig = pool.get(config)
    answers: list[Answer] = []
    inside = 0
    for words in (171, 203):
        first = one(rig, about(rig, words, words, "What is it?"))
        if not with_features:
            rig.forget_features()
            rig.llm.llm_engine.reset_encoder_cache()
        second = one(rig, about(rig, words, words, "How many?"))
        other = one(rig, about(rig, words, words + 1, "How many?"))
        ((start, end),) = rig.image_spans(second)
        inside += start < second.num_cached_tokens < end
        assert 0 < second.num_cached_tokens <= end
        assert other.num_cached_tokens <= start, "another picture of as many tokens"
        assert other.logprobs != second.logprobs
        answers += [first, second, other]
    assert inside > 0, "no hit ended inside an image"
    rig.assert_exact(answers)


SMALL_STEPS = [
    pytest.param(EngineConfig("qwen3-vl", batched_tokens=64), id="qwen3-vl"),
    pytest.param(
        EngineConfig("qwen3.5", batched_tokens=160, more=(("prefix_cache_retention_interval", None),)), id="qwen3.5"
    ),
]


@larger
@pytest.mark.parametrize("config", SMALL_STEPS)
def test_a_client_that_left_in_the_middle_of_an_image(pool: EnginePool, config: EngineConfig) -> None:
    rig = pool.get(config)
    answers: list[Answer] = []
    inside = 0
    for number, steps in enumerate((1, 2, 3, 4)):
        question = about(rig, 100 + 3 * number, number, "What is it?")
        with Asked(rig) as asking:
            asking.ask(question)
            asking.step(steps)
        again = one(rig, question)
        ((start, end),) = rig.image_spans(again)
        inside += start < again.num_cached_tokens < end - rig.block_tokens // 2
        left = about(rig, 100 + 3 * number, number + 10, "What is it?")
        other = one(rig, left)
        assert other.num_cached_tokens <= start
        answers += [again, other]
    assert inside > 0
    rig.assert_exact(answers)


@contextmanager
def little_room(rig: ZooRig, tokens: int) -> Iterator[None]:
    """The scheduler's budget and cache for images are this large; a request is refused where an image is larger."""
    scheduler = rig.scheduler
    manager, budget = scheduler.encoder_cache_manager, scheduler.max_num_encoder_input_tokens
    manager.reset()
    before = manager.cache_size
    manager.cache_size, scheduler.max_num_encoder_input_tokens = tokens, tokens
    manager.reset()
    try:
        yield
    finally:
        manager.cache_size, scheduler.max_num_encoder_input_tokens = before, budget
        manager.reset()
        forget_outputs(rig)


@pytest.mark.any_engine
@pytest.mark.parametrize("config", [pytest.param(EngineConfig(family), id=family) for family in FAMILIES])
def test_growing_screenshots_and_an_encoder_cache_for_one(pool: EnginePool, config: EngineConfig) -> None:
    """Conversations go on with larger and larger screenshots, two of them at once: all end, and all are right.

    Reported is a server that hangs, with screenshots up to 1280x800; here they have the same shape, and a model that
    is as much smaller.
    """
    rig = pool.get(config)
    ((start, end),) = rig.image_spans(one(rig, user(picture(99, SHOTS[-1]), "How large is it?")))
    talks: list[list[Any]] = [[], []]
    answers: list[Answer] = []
    with little_room(rig, end - start):
        for turn, size in enumerate(SHOTS):
            for number, talk in enumerate(talks):
                before = filler(170) if not talk else ""
                shot = picture(10 * number + turn, size)
                talk.append(user(before, shot, f"{turn}: what now?" + filler(20 + 61 * number, turn)))
            said = ask_stepwise(rig, talks)
            for talk, answer in zip(talks, said, strict=True):
                talk.append(assistant(answer.text))
            answers += said
        again = ask_stepwise(rig, [[*talk[:-2], *swapped(talk[-2])] for talk in talks])
    assert all(answer.num_cached_tokens > 0 for answer in answers[-4:])
    for answer in again:
        assert answer.num_cached_tokens <= rig.image_spans(answer)[-1][0], "another picture of as many tokens"
    rig.assert_exact(answers + again)


def test_a_request_without_an_end_is_noticed(pool: EnginePool) -> None:
    """Negative control: no room for the image, so that it is never scheduled."""
    rig = pool.get(EngineConfig("qwen3-vl"))
    ((start, end),) = rig.image_spans(one(rig, user(picture(99, SHOTS[-1]), "How large is it?")))
    with little_room(rig, end - start - 1), pytest.raises(AssertionError, match="no end after"):
        ask_stepwise(rig, [[user(picture(98, SHOTS[-1]), "How large is it?")]])


def swapped(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The same question about another picture."""
    (image,) = [part for part in message["content"] if part["type"] == "image"]
    others = [part if part is not image else {**part, "image": picture(77, SHOTS[-1])} for part in message["content"]]
    return [message | {"content": others}]


def ask_stepwise(rig: ZooRig, talks: list[list[Any]]) -> list[Answer]:
    """Both at once, in as many steps as it takes, within a bound: a hang is a failure, not a timeout."""
    prompts = {}
    for talk in talks:
        prompt, images = rig.render(talk)
        params = SamplingParams(max_tokens=4, temperature=0, logprobs=NUM_LOGPROBS, ignore_eos=True)
        (name,) = rig.llm.enqueue(
            [{"prompt": prompt, "multi_modal_data": {"image": list(images)}}], params, use_tqdm=False
        )
        prompts[name.partition("-")[0]] = prompt, images
    found: dict[str, Answer] = {}
    for _ in range(200):
        for output in rig.llm.llm_engine.step():
            if output.finished:
                found[output.request_id] = Answer.of(*prompts[output.request_id], output)
        if len(found) == len(prompts):
            return [found[name] for name in prompts]
    rig.llm.llm_engine.abort_request(list(rig.scheduler.requests), internal=True)
    raise AssertionError(f"no end after 200 steps: {len(found)} of {len(prompts)} answers")
