# SPDX-License-Identifier: Apache-2.0
"""The checks of one item: one engine, some rooms switched on, in a process of its own.

Each check is passed, failed or not checked, with a reason. A pass needs more than right answers: the rooms are really
in force, what they are for really happened, and two controls show that a wrong answer would have been seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from prometheus_client import REGISTRY
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_mmcache import events
from vllm_mmcache.prove import load, scenarios, workloads
from vllm_mmcache.prove.engines import Answer, EngineConfig, EnginePool, Rig
from vllm_mmcache.prove.expect import Inexact, assert_detects, assert_exact
from vllm_mmcache.prove.scenarios import filler, finds_all, one, picture, user
from vllm_mmcache.prove.tasks import run_task
from vllm_mmcache.upstream import start, swap
from vllm_mmcache.upstream.ledger import groups
from vllm_mmcache.upstream.proven import ENGINE_ROOMS

PASSED, FAILED, NOT_CHECKED = "passed", "failed", "not checked"

SHORT = (scenarios.same_again, scenarios.swapped_image)
SHAPES = {"qwen3.5": workloads.Shape((448, 448), 180), "gemma3": workloads.Shape((224, 224), 150)}
KV_BYTES = 1 << 30
SMALL_STEPS = 96  # tokens; an image of 64 fits such a step, two don't


class NotChecked(Exception):
    """The check has no meaning here; the message says why."""


@dataclass(frozen=True)
class Row:
    """What one check found. `inexact` says that it failed because an answer was wrong."""

    check: str
    state: str
    reason: str = ""
    inexact: bool = False


def row_of(check: str, run: Callable[[], Any]) -> Row:
    """Run one check. Nothing that it raises ends the others."""
    try:
        run()
    except NotChecked as why:
        return Row(check, NOT_CHECKED, str(why))
    except Inexact as error:
        return Row(check, FAILED, str(error), inexact=True)
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        return Row(check, FAILED, f"{type(error).__name__}: {said}" if said else type(error).__name__)
    return Row(check, PASSED)


def check(
    pool: EnginePool, family: str, rooms: Sequence[str], runner: str, precision: str | None, compiled: bool, short: bool
) -> dict[str, Any]:
    """All checks of an item. No rooms is stock vLLM."""
    rig = pool.get(config_of(family, rooms, precision, compiled))
    rows = [row_of("engine", lambda: assert_engine(rig, runner)), *rows_of(rig, rooms, short)]
    engine = {
        "model_runner": type(rig.runner).__module__,
        "block_tokens": rig.block_tokens,
        "dtype": str(rig.config.dtype).removeprefix("torch."),
        "compiled": compiled,
        "async_scheduling": schedules_ahead(rig),
    }
    return {"engine": engine, "rows": [asdict(row) for row in rows]}


def config_of(family: str, rooms: Sequence[str], precision: str | None, compiled: bool) -> EngineConfig:
    """The engine of an item; spans are whole or split only where steps are small."""
    small = SMALL_STEPS if tuple(rooms) == ("image_spans",) else 2048
    more: tuple[tuple[str, Any], ...] = (("enforce_eager", False),) if compiled else ()
    if not current_platform.is_cpu():  # several engines share a GPU; the models are tiny
        more += (("gpu_memory_utilization", 0.05), ("kv_cache_memory_bytes", KV_BYTES))
    return EngineConfig(family, batched_tokens=small, precision=precision, more=more)


def rows_of(rig: Rig, rooms: Sequence[str], short: bool) -> list[Row]:
    """Rooms in force, what they are for, answers of the scenarios, and the controls, which spoil the cache.

    What they are for comes first: checkpoints are given up where they don't pay, as in many of the scenarios.
    """
    rows = [row_of(f"{room} is on", partial(assert_on, rig, room)) for room in rooms]
    rows.append(row_of("nothing else is on", lambda: assert_off(set(ENGINE_ROOMS) - set(rooms))))

    def put(scenario: scenarios.Scenario) -> None:
        rig.make_cold()
        assert_exact(rig, scenario(rig))

    for room in rooms:
        if room in USES:
            rows.append(row_of(f"use of {room}", partial(USES[room], rig)))
    for scenario in SHORT if short else scenarios.MAIN:
        rows.append(row_of(scenario.__name__, partial(put, scenario)))
    rows.append(row_of("control: other image", lambda: assert_other_image_is_seen(rig)))
    rows.append(row_of("control: spoiled KV", lambda: assert_spoiled_kv_is_seen(rig)))
    return rows


def schedules_ahead(rig: Rig) -> bool:
    """Whether the next step is scheduled before the last one's tokens are known."""
    return isinstance(rig.llm.llm_engine.engine_core.engine_core.scheduler, AsyncScheduler)


def assert_engine(rig: Rig, runner: str) -> None:
    """vLLM took the model runner that was asked for, and with V2 async scheduling, as it does for users."""
    module = type(rig.runner).__module__
    assert rig.llm.llm_engine.vllm_config.use_v2_model_runner == (runner == "V2"), f"not {runner}: {module}"
    is_v2 = module.startswith(("vllm.v1.worker.gpu.", "vllm.v1.worker.cpu."))
    assert is_v2 == (runner == "V2"), f"not {runner}: {module}"
    assert schedules_ahead(rig) or runner == "V1", "V2 without async scheduling is not the engine that users run"


def assert_on(rig: Rig, room: str) -> None:
    """The room's symbols are replaced in this process, which is that of the engine, too."""
    missing = [member.name for member in groups()[room] if not swap.is_replaced(member.target)]
    assert not missing, start.why_off(room) or f"not replaced: {', '.join(missing)}; is the plugin loaded?"
    if room == "features":
        from vllm_mmcache.features.vllm_facts import why_not

        assert rig.features is not None, why_not(rig.llm.llm_engine.vllm_config, rig.runner) or "no feature store"


def assert_off(rooms: set[str]) -> None:
    """A room that should be off would lend its name's pass to another."""
    on = [room for room in ENGINE_ROOMS if room in rooms and all(swap.is_replaced(m.target) for m in groups()[room])]
    assert not on, f"{', '.join(on)} should be off"


def use_block_keys(rig: Rig) -> None:
    """The engine has the room's hasher."""
    hasher = rig.llm.llm_engine.engine_core.engine_core.request_block_hasher
    assert type(hasher).__module__.startswith("vllm_mmcache."), f"the engine's block hasher is {hasher}"


def use_image_spans(rig: Rig) -> None:
    """Mixed requests on small steps: no step ends inside an image, and every answer is exact."""
    if rig.config.family != "gemma3":
        raise NotChecked("the family's images don't attend both ways")
    if rig.config.batched_tokens != SMALL_STEPS:
        raise NotChecked("this item's steps hold whole prompts")
    rig.make_cold()
    with load.counted(rig) as counts:
        answers = load.run(rig, 16, seed=1)
    assert counts["split"] == 0, f"{counts['split']} images were split in {counts['steps']} steps"
    assert counts["steps"] > len(answers), "the steps are too large for this check to mean anything"
    assert_exact(rig, answers)


def use_resumed_images(rig: Rig) -> None:
    """A request loses its blocks and its image's features, and comes back; stock's first model runner dies of it."""
    if rig.config.family == "qwen3.5":
        raise NotChecked("this family's hit does not cover the image in this check")
    rig.make_cold()
    assert_exact(rig, scenarios.resume_without_blocks(rig))


def use_image_checkpoints(rig: Rig) -> None:
    """The second question about an image resumes at a checkpoint behind it."""
    if finds_all(rig):
        raise NotChecked("the family keeps every block; there is nothing to checkpoint")
    rig.make_cold()
    before = events.CHECKPOINTS_USED.value
    answers = workloads.run(rig, workloads.questions(SHAPES[rig.config.family], 3, 2))
    assert events.CHECKPOINTS_USED.value > before, "no hit ended on a checkpoint"
    found = workloads.reuse(rig, answers)
    assert found["cached_tokens"] >= 0.98 * found["best_tokens"] > 0, f"reused: {found}"
    assert_exact(rig, [answer for _, answer in answers])


def use_metrics(rig: Rig) -> None:
    """What is counted in the engine is on /metrics after the next step."""
    counter, name = events.TOWER_TOKENS, "mmcache:tower_tokens_total"
    before = REGISTRY.get_sample_value(name) or 0
    counter.add(1000)
    one(rig, user(filler(20)))
    grown = (REGISTRY.get_sample_value(name) or 0) - before
    assert grown >= 1000, f"{name} grew by {grown} for 1000 counted"


def use_features(rig: Rig) -> None:
    """The vision tower does not run again for an image that it has seen, and the answer is exact."""
    rig.make_cold()
    runs = []
    answers: list[Answer] = []
    for question in ("What is it?", "And what is at its edge?"):
        rig.forget_all_but_features()
        before = events.TOWER_IMAGES.value
        answers.append(one(rig, user(filler(60), picture(42), question)))
        runs.append(int(events.TOWER_IMAGES.value - before))
    assert runs == [1, 0], f"runs of the vision tower: {runs}"
    assert_exact(rig, answers)


USES: dict[str, Callable[[Rig], None]] = {
    "block_keys": use_block_keys,
    "image_spans": use_image_spans,
    "resumed_images": use_resumed_images,
    "image_checkpoints": use_image_checkpoints,
    "metrics": use_metrics,
    "features": use_features,
}


def assert_other_image_is_seen(rig: Rig) -> None:
    """Answers about two pictures are exact; each, judged as one about the other, is far out of tolerance."""
    rig.make_cold()
    answers = rig.ask(*[[user(filler(60), picture(number), "What is in this picture?")] for number in (30, 31)])
    assert_exact(rig, answers)
    assert_detects(answers[0], answers[1], rig.oracle)
    assert_detects(answers[1], answers[0], rig.oracle)


def assert_spoiled_kv_is_seen(rig: Rig) -> None:
    """A hit on blocks that hold other values is judged wrong, so hits really read the cache, and wrong ones fail."""
    rig.make_cold()
    ask = user(filler(180), picture(32), "What is in this picture?" + filler(20))
    assert_exact(rig, [one(rig, ask)])
    one(rig, ask)  # what is compared with an own cold run has emptied the cache
    tensors = rig.kv_tensors()
    if not tensors:
        raise NotChecked("this model runner does not show its KV cache")
    for tensor in tensors:
        tensor.mul_(-2)
    hit = one(rig, ask)
    assert hit.num_cached_tokens > 0, "the request was no hit"
    try:
        assert_exact(rig, [hit])
    except Inexact:
        return
    finally:
        rig.make_cold()
    raise AssertionError("an answer from a spoiled KV cache was judged right")


if __name__ == "__main__":
    run_task({"check": check})
