# SPDX-License-Identifier: Apache-2.0
"""A GDN state at an image's end costs no step and changes no run of the vision tower; answers are those of cold runs.

Stock is the same engine with both components switched off; with this one alone switched off, chunks end. The tests of
image_checkpoints run with it on, among them random load on a small KV cache. Negative controls: a state that is not
copied, or goes into another block, is found by a later answer, and a core that is not cut ends the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool, ZooRig
from mmcache_tools.harness.tolerances import assert_equals_answer

from tests.engine.exactness.mixed import ask_mixed
from vllm_mmcache.base import status
from vllm_mmcache.components.image_checkpoints.expected_value import ReuseRates
from vllm_mmcache.components.inner_checkpoints.cuts import CUTS, Cut
from vllm_mmcache.components.inner_checkpoints.vllm_gdn import StateNotWritten, Step
from vllm_mmcache.exactness.answers import Answer, Inexact
from vllm_mmcache.exactness.conversations import filler, one, picture, user

pytestmark = pytest.mark.engine

QWEN = EngineConfig("qwen3.5")
# A prompt takes several such steps: its chunks begin and end between its checkpoints, and at some of them.
SMALL_STEPS = EngineConfig("qwen3.5", batched_tokens=512)
SIZE = (448, 448)
PROMPTS: dict[str, Sequence[Any]] = {
    "one image": [filler(150), picture(1, SIZE), filler(220)],
    "two images": [filler(150), picture(1, SIZE), filler(40), picture(2, SIZE), filler(220)],
    "four images": [part for n in range(4) for part in (filler(90, n), picture(n, SIZE))] + [filler(200)],
}


@dataclass
class Steps:
    """What the scheduler gave to the workers since it was last asked."""

    tokens: list[list[int]] = field(default_factory=list)
    """Of each request of each step that has a prefill."""
    images: list[list[list[int]]] = field(default_factory=list)
    """That each request of each step has encoded."""
    cuts: int = 0

    def take(self) -> "Steps":
        taken = Steps(self.tokens, self.images, self.cuts)
        self.tokens, self.images, self.cuts = [], [], 0
        return taken


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Switches checkpoints, and those inside a chunk, on or off."""

    def to(checkpoints: bool, inner: bool) -> None:
        monkeypatch.setitem(status._is_on, "image_checkpoints", checkpoints)
        monkeypatch.setitem(status._is_on, "inner_checkpoints", inner)

    return to


def watch(rig: ZooRig, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Note from now on what is scheduled."""
    steps, schedule = Steps(), rig.scheduler.schedule

    def noting(*args: Any, **kwargs: Any) -> Any:
        step = schedule(*args, **kwargs)
        tokens = list(step.num_scheduled_tokens.values())
        if max(tokens, default=0) > 1:
            steps.tokens.append(tokens)
            steps.images.append(list(step.scheduled_encoder_inputs.values()))
        steps.cuts += sum(map(len, getattr(step, CUTS, {}).values()))
        return step

    monkeypatch.setattr(rig.scheduler, "schedule", noting)
    return steps


def ask(rig: ZooRig, parts: Sequence[Any], question: int = 0) -> Answer:
    return one(rig, user(*parts[:-1], f"{question}:" + parts[-1]))


def end_of_last_image(rig: ZooRig, answer: Answer) -> int:
    return int(rig.image_spans(answer)[-1][1] // rig.block_tokens * rig.block_tokens)


def test_it_is_on(pool: EnginePool) -> None:
    """So what follows is about it; a rank that could not take part would have switched it off."""
    pool.get(QWEN)
    assert status.is_on("inner_checkpoints")


@pytest.mark.any_engine
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("config", [QWEN, SMALL_STEPS], ids=["whole", "small-steps"])
def test_first_requests_take_the_steps_of_stock_and_answer_as_it_does(
    pool: EnginePool, config: EngineConfig, prompt: str, switch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunk by chunk, and run of the tower by run; the second question resumes at the last image's end."""
    rig = pool.get(config)
    steps = watch(rig, monkeypatch)
    found, answers, cached = {}, {}, {}
    for side, on in {"stock": (False, False), "ended": (True, False), "inner": (True, True)}.items():
        switch(*on)
        rig.scheduler._mmcache_checkpoints.rates = ReuseRates()  # nobody has asked about unique images so far
        rig.make_cold()
        steps.take()
        answers[side] = ask(rig, PROMPTS[prompt])
        found[side] = steps.take()
        second = ask(rig, PROMPTS[prompt], 1)
        cached[side] = second.num_cached_tokens
    rig.assert_exact([answers["inner"], second])
    print(prompt, {side: (one.tokens, one.images, cached[side]) for side, one in found.items()})
    assert found["inner"].cuts > 0
    assert (found["inner"].tokens, found["inner"].images) == (found["stock"].tokens, found["stock"].images)
    assert len(found["ended"].tokens) > len(found["stock"].tokens), "the control: chunks that end cost steps"
    assert cached["inner"] == cached["ended"] == end_of_last_image(rig, answers["inner"]) > cached["stock"]
    assert_equals_answer(answers["inner"], answers["stock"], rig.tolerance, "stock")


@pytest.mark.any_engine
def test_a_batch_of_prefills_and_decodes(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several requests are cut in one step, beside others that decode; then each is asked again from its states."""
    rig = pool.get(EngineConfig("qwen3.5", num_seqs=3, batched_tokens=4096))
    steps = watch(rig, monkeypatch)
    asked: list[list[Any]] = [
        [filler(100 + 30 * n, n), picture(n, SIZE), filler(20), picture(n + 1, SIZE), filler(50 * n + 9, n)]
        for n in range(4)
    ]
    answers = rig.ask(*([user(*parts)] for parts in asked), max_tokens=[20, 3, 7, 5])
    seen = steps.take()
    assert any(min(tokens) == 1 < max(tokens) for tokens in seen.tokens), "a decode beside a prefill"
    assert any(sum(number > 1 for number in tokens) > 1 for tokens in seen.tokens), "several prefills"
    assert seen.cuts >= 2 * len(asked)
    later = rig.ask(*([user(*parts[:-1], filler(9, 50))] for parts in asked), max_tokens=6)
    assert all(answer.num_cached_tokens > 160 for answer in later)
    rig.assert_exact([*answers, *later])


@pytest.mark.parametrize("spoiled", ["not copied", "of another group"])
def test_a_wrong_state_is_found(pool: EnginePool, spoiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the state at the image's end is not written, or is written over that of another group."""
    rig = pool.get(QWEN)
    keep, groups = Step._keep, len(rig.scheduler.kv_cache_manager.coordinator.single_type_managers) - 1

    def wrong(step: Step, layer: Any, metadata: Any, row: int, cut: Any) -> None:
        if spoiled == "of another group":
            blocks = {group: cut.blocks[(group + 1) % groups] for group in cut.blocks}
            keep(step, layer, metadata, row, Cut(cut.offset, blocks))

    ask(rig, [filler(150, 7), picture(5, SIZE), filler(220)])  # so that blocks hold something
    monkeypatch.setattr(Step, "_keep", wrong)
    ask(rig, PROMPTS["one image"])
    second = ask(rig, PROMPTS["one image"], 1)
    assert second.num_cached_tokens == end_of_last_image(rig, second)
    monkeypatch.setattr(Step, "_keep", keep)
    with pytest.raises(Inexact):
        rig.assert_exact([second])


@pytest.mark.any_engine
def test_too_few_blocks_make_no_checkpoint_and_no_request_waits(
    pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that fills the KV cache: its states get no blocks, so it takes stock's steps and nothing is found."""
    rig = pool.get(EngineConfig("qwen3.5", num_blocks=18, max_tokens=1600))
    steps = watch(rig, monkeypatch)
    answers = [ask(rig, PROMPTS["four images"], number) for number in range(2)]
    assert len(answers[0].prompt_ids) > 6 * rig.block_tokens
    assert steps.take().cuts == 0
    rig.assert_exact(answers)
    short = [ask(rig, PROMPTS["one image"], number) for number in range(2)]
    assert steps.take().cuts > 0, "the control: a shorter one gets them"
    rig.assert_exact(short)


@pytest.mark.any_engine
def test_a_request_that_ends_or_comes_back_between_its_chunks(
    pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborted after a chunk with a checkpoint, its state is used; preempted, it resumes there, and is exact."""
    rig = pool.get(SMALL_STEPS)
    engine, steps = rig.llm.llm_engine, watch(rig, monkeypatch)

    def until_cut(question: int) -> None:
        rig.enqueue([user(*PROMPTS["four images"][:-1], f"{question}:" + PROMPTS["four images"][-1])], max_tokens=8)
        steps.take()
        while not steps.cuts:
            engine.step()

    until_cut(0)
    engine.abort_request(list(rig.scheduler.requests), internal=True)
    while engine.has_unfinished_requests():
        engine.step()
    after_abort = ask(rig, PROMPTS["four images"], 1)
    assert after_abort.num_cached_tokens > 0
    rig.assert_exact([after_abort])
    rig.make_cold()
    until_cut(2)
    (request,) = rig.scheduler.requests.values()
    rig.scheduler.running.remove(request)
    rig.scheduler._preempt_request(request, 0.0)
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    cold = ask(rig, PROMPTS["four images"], 2)
    assert tuple(outputs[-1].outputs[0].token_ids) == cold.token_ids
    rig.assert_exact([cold])


@pytest.mark.any_engine
def test_where_it_is_off_chunks_end_at_checkpoints(
    pool: EnginePool, switch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank that can't take part makes of all: random load, exact, and with checkpoints."""
    rig = pool.get(EngineConfig("qwen3.5", num_blocks=48, num_seqs=6, max_tokens=1280))
    switch(True, False)
    steps = watch(rig, monkeypatch)
    answers = ask_mixed(rig, 2, SIZE)
    assert steps.take().cuts == 0
    assert any(answer.num_cached_tokens for answer in answers)
    rig.assert_exact(answers)


def test_a_layer_that_writes_no_state_ends_the_engine(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key is published already: rather no answer than a wrong one to whoever finds it."""
    rig = pool.get(QWEN)

    def uncut(step: Step, layer: Any, metadata: Any, part_for: Any, core: Any) -> None:
        core(metadata, slice(None))

    monkeypatch.setattr(Step, "compute", uncut)
    with pytest.raises(StateNotWritten, match="kept no state"):
        ask(rig, PROMPTS["one image"])
    monkeypatch.undo()
    pool.close()
