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

from vllm_mmcache.base import status
from vllm_mmcache.lifecycle import activation, user_proofs
from vllm_mmcache.lifecycle.tested_engines import ENGINE_ROOMS, why_unproven
from vllm_mmcache.metrics import counters
from vllm_mmcache.prove import load, scenarios, workers, workloads
from vllm_mmcache.prove.engines import Answer, EngineConfig, EnginePool, Rig
from vllm_mmcache.prove.expect import Inexact, assert_detects, assert_exact
from vllm_mmcache.prove.scenarios import filler, one, picture, user

PASSED, FAILED, NOT_CHECKED = "passed", "failed", "not checked"

SHORT = (scenarios.same_again, scenarios.swapped_image)
SHAPES = {"qwen3.5": workloads.Shape((448, 448), 180), "gemma3": workloads.Shape((224, 224), 150)}
KV_BYTES = 1 << 30
SMALL_STEPS, WHOLE_STEPS = 96, 2048  # tokens; an image of 64 fits a small one, two don't


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
    pool: EnginePool,
    family: str,
    rooms: Sequence[str],
    runner: str | None,
    precision: str | None,
    compiled: bool,
    short: bool,
    arguments: Sequence[str] = (),
) -> dict[str, Any]:
    """All checks of an item on a zoo model. No rooms is stock vLLM; no runner is the one that vLLM takes."""
    rig = pool.get(config_of(family, rooms, precision, compiled, arguments))
    rows = [row_of("engine", lambda: assert_engine(rig, runner)), *rows_of(rig, rooms, short)]
    return {"engine": engine_of(rig), "rows": [asdict(row) for row in rows], **place_of(rig)}


def engine_of(rig: Rig) -> dict[str, Any]:
    """What the item ran on."""
    return {
        "model_runner": type(rig.runner).__module__ if rig.runner is not None else "in worker processes",
        "block_tokens": rig.block_tokens,
        "dtype": str(rig.dtype).removeprefix("torch."),
        "compiled": not rig.vllm_config.model_config.enforce_eager,
        "async_scheduling": schedules_ahead(rig),
    }


def place_of(rig: Rig) -> dict[str, Any]:
    """What a proof of this item is tied to, which rooms are on there without one, and what its model has a use for."""
    place = user_proofs.Place.of(rig.vllm_config)
    engine = activation.engine_here(rig.vllm_config)
    uses = {
        "image_spans": rig.images_attend_both_ways,
        "resumed_images": place.runner == 1 and not rig.vllm_config.model_config.is_hybrid,
        "image_checkpoints": not rig.keeps_all_kv,
    }
    return {
        "place": asdict(place),
        "proven": [room for room in ENGINE_ROOMS if not why_unproven(room, engine)],
        "of_use": [room for room in ENGINE_ROOMS if uses.get(room, True)],
    }


def arguments_of(arguments: Sequence[str], *, own: bool) -> dict[str, Any]:
    """What the item's engine takes of vLLM's arguments, by name; what is left out was said before the first item."""
    if not arguments:
        return {}
    from vllm_mmcache.prove.arguments import given, taken

    return taken(given(arguments), own=own)[0]


def config_of(
    family: str, rooms: Sequence[str], precision: str | None, compiled: bool, arguments: Sequence[str] = ()
) -> EngineConfig:
    """The engine of an item; spans are whole or split only where steps are small."""
    small = SMALL_STEPS if alone_on_small_steps(rooms) else WHOLE_STEPS
    more: tuple[tuple[str, Any], ...] = (("enforce_eager", False),) if compiled else ()
    if not current_platform.is_cpu():  # several engines share a GPU; the models are tiny
        more += (("gpu_memory_utilization", 0.05), ("kv_cache_memory_bytes", KV_BYTES))
    more += tuple(arguments_of(arguments, own=False).items())
    return EngineConfig(family, batched_tokens=small, precision=precision, more=more)


def alone_on_small_steps(rooms: Sequence[str]) -> bool:
    """Whether an item is there to show that small steps don't split images."""
    return tuple(rooms) == ("image_spans",)


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
    return isinstance(rig.scheduler, AsyncScheduler)


def assert_engine(rig: Rig, runner: str | None) -> None:
    """Assert that vLLM took the model runner asked for, and with V2 async scheduling, as it does for users."""
    if runner is None:
        return
    module = type(rig.runner).__module__
    assert rig.vllm_config.use_v2_model_runner == (runner == "V2"), f"not {runner}: {module}"
    is_v2 = module.startswith(("vllm.v1.worker.gpu.", "vllm.v1.worker.cpu."))
    assert is_v2 == (runner == "V2"), f"not {runner}: {module}"
    assert schedules_ahead(rig) or runner == "V1", "V2 without async scheduling is not the engine that users run"


def assert_on(rig: Rig, room: str) -> None:
    """The report of this deployment, which asks every process, says that the room is on, or has nothing to do."""
    found = status.in_force()
    assert found, "no process has reported: is the plugin loaded?"
    assert found[room].state != "mixed", str(found[room])
    if found[room].state == "off":
        raise NotChecked(f"off here: {found[room].reason}")


def assert_off(rooms: set[str]) -> None:
    """A room that should be off would lend its name's pass to another."""
    on = [room for room, found in status.in_force().items() if room in rooms and found.state in ("on", "mixed")]
    assert not on, f"{', '.join(on)} should be off"


def words_before(rig: Rig) -> int:
    """Words before an image that fill more than a block, and more than a window where there is one, if that fits."""
    managers = rig.scheduler.kv_cache_manager.coordinator.single_type_managers
    windows = [int(getattr(manager.kv_cache_spec, "sliding_window", None) or 0) for manager in managers]
    longest = int(rig.vllm_config.model_config.max_model_len) // 3
    return min(max(180, rig.block_tokens * 5 // 4, max(windows) * 5 // 4), longest)


def use_block_keys(rig: Rig) -> None:
    """The engine has the room's hasher."""
    hasher = rig.llm.llm_engine.engine_core.engine_core.request_block_hasher  # of the engine in this process
    assert type(hasher).__module__.startswith("vllm_mmcache."), f"the engine's block hasher is {hasher}"


def use_image_spans(rig: Rig) -> None:
    """Mixed requests on small steps: no step ends inside an image, and every answer is exact."""
    if not rig.images_attend_both_ways:
        raise NotChecked("the model's images don't attend both ways")
    if rig.config.batched_tokens in (None, WHOLE_STEPS):
        raise NotChecked("this item's steps hold whole prompts")
    rig.make_cold()
    with load.counted(rig) as counts:
        answers = load.run(rig, 16, seed=1)
    assert counts["split"] == 0, f"{counts['split']} images were split in {counts['steps']} steps"
    assert counts["steps"] > len(answers), "the steps are too large for this check to mean anything"
    assert_exact(rig, answers)


def use_resumed_images(rig: Rig) -> None:
    """A request loses its blocks and its image's features, and comes back; stock's first model runner dies of it."""
    if rig.vllm_config.model_config.is_hybrid:
        raise NotChecked("this model's hit does not cover the image in this check")
    rig.make_cold()
    assert_exact(rig, scenarios.resume_without_blocks(rig))


def use_image_checkpoints(rig: Rig) -> None:
    """The second question about an image resumes at a checkpoint behind it."""
    if rig.keeps_all_kv:
        raise NotChecked("the model keeps every block; there is nothing to checkpoint")
    rig.make_cold()
    before = counters.CHECKPOINTS_USED.value
    shape = SHAPES.get(rig.config.family) or workloads.Shape((448, 448), words_before(rig))
    answers = workloads.run(rig, workloads.questions(shape, 3, 2))
    assert counters.CHECKPOINTS_USED.value > before, "no hit ended on a checkpoint"
    found = workloads.reuse(rig, answers)
    assert found["cached_tokens"] >= 0.98 * found["best_tokens"] > 0, f"reused: {found}"
    assert_exact(rig, [answer for _, answer in answers])


def use_metrics(rig: Rig) -> None:
    """What is counted in the engine is on /metrics after the next step."""
    counter, name = counters.TOWER_TOKENS, "mmcache:tower_tokens_total"
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
        before = max(rig.in_workers(workers.tower_images))
        answers.append(one(rig, user(filler(60), picture(42), question)))
        runs.append(max(rig.in_workers(workers.tower_images)) - before)
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
    ask = user(filler(words_before(rig)), picture(32), "What is in this picture?" + filler(20))
    assert_exact(rig, [one(rig, ask)])
    one(rig, ask)  # what is compared with an own cold run has emptied the cache
    if not all(rig.in_workers(workers.spoil_kv)):
        raise NotChecked("this model runner does not show its KV cache")
    hit = one(rig, ask)
    assert hit.num_cached_tokens > 0, "the request was no hit"
    try:
        assert_exact(rig, [hit])
    except Inexact:
        return
    finally:
        rig.make_cold()
    raise AssertionError("an answer from a spoiled KV cache was judged right")
