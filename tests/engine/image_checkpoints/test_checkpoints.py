# SPDX-License-Identifier: Apache-2.0
"""The second question about an image is a hit, and its answer is that of a cold run, on real engines.

Workloads are the benchmark's, smaller, and more. Negative controls: without checkpoints the second question misses, and
behind a swapped image nothing is reused. With async scheduling: ../test_async.py, and all of this in `make matrix`.
"""

from collections.abc import Callable
from typing import Any

import pytest
from mmcache_tools.harness.engines import EngineConfig, EnginePool

from benchmarks.workloads import demos, interleaved
from tests.engine.exactness.mixed import BATCH, ask_mixed, assert_all_cold
from tests.support.engine_configuration import CHOSEN
from tests.support.sizes import WHOLE, larger, scaled
from vllm_mmcache.base import settings, status
from vllm_mmcache.exactness.conversations import assistant, filler, one, picture, user
from vllm_mmcache.metrics import counters
from vllm_mmcache.prove.workloads import Asks, Shape, questions, reuse, run

pytestmark = pytest.mark.engine


def growing(shape: Shape, turns: int) -> Asks:
    """A conversation that adds an image each turn."""
    talk: list[Any] = []
    for turn in range(turns):
        text = filler(shape.words // turns)
        talk.append(user(text, picture(turn, (448, 448)), shape.question(turn)))
        answer = yield turn > 0, list(talk)
        talk.append(assistant(answer.text))


def shifted(shape: Shape, images: int, count: int) -> Asks:
    """Text of another length before each image, so that all positions are shifted."""
    for image in range(images):
        for number in range(count):
            text = filler(200 + 37 * image + shape.words // 2, image)
            yield number > 0, [user(text, picture(image, shape.size), shape.question(number))]


def unique(shape: Shape, requests: int, first: int = 1000) -> Asks:
    """A shared system prompt, and every picture only once."""
    system = {"role": "system", "content": [{"type": "text", "text": filler(500)}]}
    for number in range(requests):
        yield number > 0, [system, user(picture(first + number, (512, 512)), shape.question(number))]


SHAPES = {"qwen3.5": Shape((448, 448), 180), "gemma3": Shape((224, 224), 150)}
MAIN = {family: EngineConfig(family) for family in SHAPES}
WORKLOADS: dict[str, Callable[[Shape], Any]] = {
    "questions": lambda shape: questions(shape, 3, 2),
    "interleaved": lambda shape: interleaved(shape, 3, 3),
    "demos": lambda shape: demos(shape, 4),
    "growing": lambda shape: growing(shape, 3),
    "shifted": lambda shape: shifted(shape, 2, 2),
}
IN_MATRIX = ("qwen3.5-dense", "gemma3-interval", "gemma3-chunks")


def configs(*names: str) -> Any:
    found = {
        "main": [MAIN["gemma3"], MAIN["qwen3.5"]],
        # Every position is kept; one in so many; chunks shorter than a prompt; keys finer than a block.
        "dense": [EngineConfig(f, more=(("prefix_cache_retention_interval", None),)) for f in SHAPES],
        "interval": [
            EngineConfig("gemma3", more=(("prefix_cache_retention_interval", 320),)),
            EngineConfig("qwen3.5", more=(("prefix_cache_retention_interval", 320),)),
        ],
        "chunks": [EngineConfig("gemma3", batched_tokens=80), EngineConfig("qwen3.5", batched_tokens=224)],
        "match_unit": [EngineConfig("qwen3.5", more=(("prefix_match_unit", 32),))],
    }
    by_id = {f"{config.family}-{name}": config for name in names for config in found[name]}
    return [pytest.param(config, id=key, marks=larger if key in IN_MATRIX else ()) for key, config in by_id.items()]


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("config", configs("main"))
def test_workloads_hit_and_are_exact(pool: EnginePool, config: EngineConfig, workload: str) -> None:
    rig = pool.get(config)
    answers = run(rig, WORKLOADS[workload](SHAPES[config.family]))
    found = reuse(rig, answers)
    assert found["cached_tokens"] >= 0.98 * found["best_tokens"] > 0, found
    rig.assert_exact([answer for _, answer in answers])


@pytest.mark.parametrize("config", configs("dense", "interval", "chunks", "match_unit"))
def test_other_configurations(pool: EnginePool, config: EngineConfig) -> None:
    rig = pool.get(config)
    answers = run(rig, questions(SHAPES[config.family], 2, 2))
    found = reuse(rig, answers)
    assert found["cached_tokens"] >= 0.98 * found["best_tokens"] > 0, found
    rig.assert_exact([answer for _, answer in answers])


@pytest.mark.any_engine
@pytest.mark.parametrize("config", configs("main"))
def test_without_checkpoints_the_second_question_misses(
    pool: EnginePool, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control, stock's behaviour; a tripwire, too: when this fails, vLLM keeps image boundaries itself."""
    rig = pool.get(config)
    monkeypatch.setitem(status._is_on, "image_checkpoints", False)
    found = reuse(rig, run(rig, questions(SHAPES[config.family], 1, 2)))
    assert found["cached_tokens"] == 0 < found["best_tokens"]


@pytest.mark.parametrize("config", configs("main"))
def test_nothing_behind_a_swapped_image_is_reused(pool: EnginePool, config: EngineConfig) -> None:
    rig = pool.get(config)
    shape = SHAPES[config.family]
    parts: list[Any] = [filler(shape.words), picture(1, shape.size), "and", picture(2, shape.size), shape.question(0)]
    first = one(rig, user(*parts))
    again = one(rig, user(*parts[:-1], shape.question(1)))
    for place in (1, 3):
        swapped = one(rig, user(*parts[:place], picture(3, shape.size), *parts[place + 1 :]))
        assert swapped.num_cached_tokens <= rig.image_spans(swapped)[place // 2][0] < again.num_cached_tokens
        rig.assert_exact([swapped])
    rig.assert_exact([first, again])


@pytest.mark.parametrize("config", configs("main"))
def test_bounds_of_the_policy(pool: EnginePool, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One checkpoint at the most: the last image's end. And none, when they must be further apart than the prompt."""
    rig = pool.get(config)
    shape = SHAPES[config.family]
    for most, apart, made in ((1, 64, 1), (4, 4096, 0), (0, 1, 0)):
        bounds = {"checkpoints_per_request": most, "checkpoint_min_tokens": apart}
        monkeypatch.setattr(settings, "_current", settings.load_settings(bounds))
        rig.make_cold()
        before = counters.CHECKPOINTS_MADE.value
        answer = one(rig, user(filler(shape.words), picture(1, shape.size), shape.question(0)))
        assert counters.CHECKPOINTS_MADE.value - before == made
        asked = one(rig, user(filler(shape.words), picture(1, shape.size), shape.question(1)))
        end = rig.image_spans(answer)[0][1] // rig.block_tokens * rig.block_tokens
        assert asked.num_cached_tokens == (end if made else 0)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(EngineConfig("gemma3", num_blocks=150, num_seqs=6, max_tokens=1024), id="gemma3-random"),
        pytest.param(EngineConfig("qwen3.5", num_blocks=48, num_seqs=6, max_tokens=1280), id="qwen3.5-random"),
    ],
)
def test_mixed_requests(pool: EnginePool, config: EngineConfig) -> None:
    """Images, lengths, salts and prefixes in many orders, a cache that evicts and preempts: each as its cold run.

    90 requests, with `make matrix` 300; of Qwen3.5 60 on model runner V2, whose interpreter takes minutes for them.
    """
    is_slow = CHOSEN.runner == 2 and config.family == "qwen3.5"
    num_batches = scaled(10 if is_slow else 50 if WHOLE else 15)
    rig = pool.get(config)
    before, preempted = counters.totals(), rig.num_preemptions()
    answers = ask_mixed(rig, num_batches, SHAPES[config.family].size)
    counts = {name: count - before[name] for name, count in counters.totals().items() if count != before[name]}
    print(counts, rig.num_preemptions() - preempted, "preemptions")
    assert len(answers) == num_batches * BATCH
    assert counts["checkpoints_made"] > len(answers) // 15
    assert counts["checkpoints_used"] > len(answers) // 30
    assert counts["checkpoints_evicted_unused"] > 0
    assert rig.num_preemptions() > preempted
    assert_all_cold(rig, answers)


@pytest.mark.parametrize("config", configs("main"))
def test_unique_pictures_back_off(pool: EnginePool, config: EngineConfig) -> None:
    """Ends of pictures that never come again are not made any more in a full cache; the start is reused all along."""
    rig = pool.get(EngineConfig(config.family, num_blocks=60 if config.family == "qwen3.5" else 170, max_tokens=1280))
    run(rig, unique(SHAPES[config.family], 45), max_tokens=1)
    made, used = counters.CHECKPOINTS_MADE.value, counters.CHECKPOINTS_USED.value
    run(rig, unique(SHAPES[config.family], 15, first=2000), max_tokens=1)
    assert counters.CHECKPOINTS_MADE.value - made <= 1, "the one that is tried in 16 requests"
    assert counters.CHECKPOINTS_USED.value - used == 15, "the picture's start"
